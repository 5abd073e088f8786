"""What chaos has found, each as a test of its own."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kcoord.artifacts import local
from kcoord.artifacts.manifest import Origin
from kcoord.rank.client import AgentClient, Lead
from kcoord.rank.coordinator import Coordinator
from kcoord.settings import Settings
from tests.support.agents import Node, key_of, until, watching
from tests.support.interpose import Interposer

KEY = key_of("k1")


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    made = Coordinator(replace(Settings.from_environ({}), local_dir=tmp_path / "local", spawn=False))
    yield made
    made.close()


@pytest.mark.parametrize("lost", ["published", "staged"])
def test_a_kernel_whose_files_vanish_as_it_is_published_is_compiled_again_by_its_process(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    def publish(lead: Lead | None, key: Any, staging: Path, home: Path, took: float, device: str) -> bool:
        if lost == "staged":
            shutil.rmtree(staging)
            return False
        local.publish_local(staging, home, key, took, Origin.here(0, None, device))
        shutil.rmtree(home)
        return True

    monkeypatch.setattr(AgentClient, "publish", lambda client, *given: publish(*given))
    compiles = []

    def compile(staging: Path) -> None:
        compiles.append(staging)
        (staging / "kernel.txt").write_text("a kernel")

    artifact = coordinator.get_or_compile(KEY, compile)
    assert (artifact.path / "kernel.txt").read_text() == "a kernel"
    assert len(compiles) == 2
    assert sum("is compiled again" in line for line in coordinator.notices.since(0)[0]) == 1


def test_an_agent_that_ends_lets_its_clients_go_before_it_waits_for_a_slow_store(
    tmp_path: Path, interposer: Interposer
) -> None:
    store = tmp_path / "store"
    with Node(store=str(store)) as node:
        agent = node.start(environ=interposer.environ)
        client = node.client()
        lead = node.claim(client, "k1")
        slow = interposer.stall("link", below=store / "v2" / "objects", seconds=4, times=1)
        assert node.publish(client, lead, "k1")  # here; on its way to the store
        until(lambda: slow.hits)
        leads = node.lead(client, "k2")
        digest, home = key_of("k2").digest, str(node.home("k2"))
        with node.wire() as waiter, watching(agent.pid) as ended:
            waiter.hello()
            waiter.send({"id": 1, "op": "claim", "digest": digest, "backend": "test", "name": "k2", "home": home})
            node.until_waiting("k2", 1)
            os.kill(agent.pid, signal.SIGTERM)
            waiter.assert_closed()
            assert not ended(0), "it waited for the store first"
            assert ended(20)
        leads.connection.close()
        log = (node.directory / "started.log").read_text()
        assert "Traceback" not in log, log
        assert "report it" not in log, log
