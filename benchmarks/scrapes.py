"""The cost of metrics for a claim: its median and 99th percentile without metrics, with them, and while they are scraped.

In each round one client claims a new key and gives it up, as fast as it can, at one agent process. In the last case another
process scrapes 1,000 pages meanwhile, without a pause.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from benchmarks.result import Result
from kcoord.rank.client import AgentClient, Lead
from tests.support.agents import Node, key_of, until

_SCRAPES, _CLAIMS, _ROUNDS = 1000, 1500, 5
_SCRAPER = """
import sys, time, urllib.request
for n in range(int(sys.argv[2])):
    with urllib.request.urlopen(f"http://{sys.argv[1]}/metrics", timeout=20) as page:
        assert b"kcoord_clients" in page.read()
"""


def run() -> Result:
    result = Result(
        "Metrics: what a claim costs while an agent is scraped",
        ["agent", "a claim, median, ms", "99 %, ms", "a scrape, ms"],
        notes=[f"{_CLAIMS} claims a round and {_SCRAPES} scrapes; the median of {_ROUNDS} rounds that took turns."],
    )
    cases = {"no metrics": (None, False), "metrics, not scraped": ("0", False), "scraped without a pause": ("0", True)}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in cases}
    for _ in range(_ROUNDS):
        for name, (metrics, scraped) in cases.items():
            found[name].append(_round(metrics, scraped))
    for name, rounds in found.items():
        middle, slow, scrape = (statistics.median(column) for column in zip(*rounds, strict=True))
        result.rows.append([name, f"{middle:.2f}", f"{slow:.2f}", f"{scrape:.2f}" if scrape else ""])
    return result


def _round(metrics: str | None, scraped: bool) -> tuple[float, float, float]:
    """Milliseconds: a claim's median and 99th percentile, and a scrape's mean."""
    with Node(**({"metrics": metrics} if metrics else {})) as node:
        node.start()
        client = node.client()
        _claim(node, client, "warm")
        scraper, begun = None, time.perf_counter()
        if scraped:
            until(lambda: node.status()["metrics"])
            address = node.status()["metrics"]
            begun = time.perf_counter()
            scraper = subprocess.Popen([sys.executable, "-c", _SCRAPER, address, str(_SCRAPES)])
        times = []
        for n in range(_CLAIMS):
            times.append(_claim(node, client, f"k{n}"))
        while scraper is not None and scraper.poll() is None:  # claims go on until the scrapes end
            times.append(_claim(node, client, f"more {len(times)}"))
        took = (time.perf_counter() - begun) * 1e3 / _SCRAPES if scraper is not None else 0.0
        assert scraper is None or scraper.returncode == 0
        return statistics.median(times), statistics.quantiles(times, n=100)[98], took


def _claim(node: Node, client: AgentClient, name: str) -> float:
    begun = time.perf_counter()
    lead = node.claim(client, name)
    took = time.perf_counter() - begun
    assert isinstance(lead, Lead)
    client.give_up(lead, key_of(name))
    return took * 1e3


if __name__ == "__main__":
    print(run().text())
