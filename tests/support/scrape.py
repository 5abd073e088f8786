"""What Prometheus does with an agent, for a test: one scrape over HTTP, read by Prometheus' own parser."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from kcoord.retention.local_collector import keeps_access_times
from tests.support.agents import ROOT, SOON, Node, until
from tests.support.cluster import start_agent
from tests.support.redis_server import RedisServer
from tests.support.sandbox import PROGRAMS

RANKS, KEYS = 3, 4
LOOKS_OFTEN = """
import kcoord.agent.chores.retention as retention
retention.FIRST = retention.LOCAL_FIRST = 0.0
retention.EVERY = 0.5
"""
"""For an agent: it looks through the store and its local directory as often as a test has time for."""
_RANK = PROGRAMS / "generic_rank.py"


def ask(address: str, method: str = "GET", path: str = "/metrics") -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(address, timeout=SOON)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


class Scraped:
    """One scrape. ``[name, label=value …]`` is a sample's value."""

    def __init__(self, address: str) -> None:
        status, self.headers, self.text = ask(address)
        assert status == 200
        self.families = list(text_string_to_metric_families(self.text))
        samples = [sample for family in self.families for sample in family.samples]
        self.values = {(s.name, frozenset(s.labels.items())): s.value for s in samples}
        assert len(self.values) == len(samples), "a sample is there twice"

    def value(self, name: str, **labels: str) -> float:
        return self.values.get((name, frozenset(labels.items())), 0.0)

    def sum(self, name: str) -> float:
        """Over all labels."""
        return sum(value for (of, _), value in self.values.items() if of == name)

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.values}


def address_of(node: Node) -> str:
    until(lambda: node.status()["metrics"])
    return str(node.status()["metrics"])


@dataclass(frozen=True)
class Job:
    """What `RANKS` ranks counted themselves, and what was scraped after them and again after Redis was lost."""

    counters: dict[str, float]
    seen: Scraped
    without_redis: Scraped


def run_job(store: str) -> Job:
    """A job of one node, with Redis until it is over."""
    bounds = {"store_max_size": "1GiB", "store_max_files": "1000", "local_max_size": "1GiB"}
    with RedisServer() as redis, Node(store=store, metrics="0", redis_url=redis.url, **bounds) as node:
        start_agent(node, LOOKS_OFTEN)
        address = address_of(node)
        ranks = [
            subprocess.Popen(
                [sys.executable, str(_RANK), str(KEYS), "0.05"], env=node.environ(RANK=str(rank), PYTHONPATH=str(ROOT)),
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        counters: dict[str, float] = {}
        for process in ranks:
            out, _ = process.communicate(timeout=60)
            assert process.returncode == 0
            for name, value in json.loads(out)["counters"].items():
                counters[name] = counters.get(name, 0) + (len(value) if isinstance(value, list) else value)
        aside = (
            "from kcoord.backends import reliances; reliances.stand_aside('toy', 'toy 2.0', 'kernels', 'it differs')"
        )
        subprocess.run([sys.executable, "-c", aside], env=node.environ(PYTHONPATH=str(ROOT)), timeout=60, check=True)
        until(lambda: Scraped(address).sum("kcoord_requests_total") == counters["requests"])
        until(lambda: Scraped(address).value("kcoord_store_published_artifacts_total") == KEYS)
        until(lambda: Scraped(address).value("kcoord_leases_held") == 0)
        until(lambda: Scraped(address).value("kcoord_store_artifacts") == KEYS)
        if keeps_access_times(node.directory):
            until(lambda: Scraped(address).value("kcoord_local_artifacts") == KEYS)
        seen = Scraped(address)
        redis.kill()
        client = node.client()
        assert node.publish(client, node.claim(client, "without Redis"), "without Redis")
        until(lambda: Scraped(address).value("kcoord_breaker_open", lease_service="redis") == 1)
        return Job(counters, seen, Scraped(address))
