"""Peers that lie, break off and stay, on either end of the agent's socket; and files that say what frames may not.

Whoever sends nonsense is told so, or cut off. Nobody else notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.agent.connections import Connections
from kcoord.leases import base as leases
from kcoord.leases import lease_files
from kcoord.packs.recipe import Recipe
from kcoord.packs.recipe_files import parts, save_part
from kcoord.protocol import frames, identity, messages
from kcoord.rank import client as client_module
from kcoord.rank.client import AgentClient, Alone, Busy, Failed, Lead, Ready
from kcoord.rank.coordinator import Coordinator
from kcoord.telemetry.events import Notices
from tests.support.agents import Node, Wire, in_thread, key_of, lookup, offer, stage, until
from tests.support.fuzzing import changed, fuzz, packed

KEY = key_of("fuzzed")
RECIPE = Recipe("triton", "train", "kernel", {"a": (1, "x")}, "cuda:90", 1.5, 3)
SPAN = ["compile", "ok", "triton", "kernel", KEY.digest[:16], 1.7e9, 0.5, 0.0, False, "", "", 0.0, 1]
NOWHERE = "/tmp/nowhere-at-all"
REQUESTS: dict[str, dict[str, Any]] = {
    "claim": {"digest": KEY.digest, "backend": "b", "name": "n", "home": f"{NOWHERE}/home", "wait": False},
    "publish": {
        "key": KEY.to_wire(), "token": "", "staging": f"{NOWHERE}/s", "home": f"{NOWHERE}/h", "compile_seconds": 1.0,
        "device": "",
    },
    "fail": {"digest": KEY.digest, "token": "1.1", "log": "l"},
    "give_up": {"digest": KEY.digest, "token": "1.1"},
    "lookup": {"digest": KEY.digest},
    "offer": {"key": KEY.to_wire(), "content": b"choice", "seconds": 1.0, "device": "d"},
    "record": {"profile": "mine", "recipes": [RECIPE.to_wire()]},
    "deliver": {"spans": [SPAN], "dropped": 0},
    "announce": {"recipes": [RECIPE.to_wire()], "profile": "mine", "node": 1, "nodes": 2},
    "join": {},
    "take": {"memory": 1 << 40, "idle": 8.0, "left": 1e6, "ended": "failed", "why": "w", "last": True},
    "status": {},
    "stats": {"job": "wire"},
}  # fmt: skip
ANSWERS = (
    "refused", "done", "lead", "alone", "busy", "ready", "failed", "choice", "granted", "joined", "work",
    "facts",
)  # fmt: skip


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


# What clients send.


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node() as node:
        node.start()
        yield node


@pytest.fixture
def bystander(node: Node) -> Iterator[Wire]:
    """Another client, connected before, that is served during and after the test by the same agent, which found no error."""
    with node.wire() as wire:
        pid = wire.hello()["pid"]
        yield wire
        assert wire.ask({"op": "status"})["pid"] == pid
        assert served(wire)
        until(lambda: wire.ask({"op": "status"})["clients"] == 1)
        status = wire.ask({"op": "status"})
        assert not [n for n in status["notices"] if "please report" in n]
        assert status["flights"] == []
        said = (node.directory / "started.log").read_text()
        assert "Traceback" not in said, said


def served(wire: Wire) -> bool:
    return wire.ask({"op": "announce"})["op"] == "granted"


@pytest.mark.parametrize("op", REQUESTS)
def test_a_valid_request_is_answered(node: Node, bystander: Wire, op: str) -> None:
    """Else what follows would fuzz nothing."""
    with node.wire() as wire:
        wire.hello()
        answer = wire.ask({"op": op, **REQUESTS[op]})
        assert answer["op"] in ANSWERS
        assert op == "publish" or answer["op"] != "refused", answer


@pytest.mark.parametrize("op", REQUESTS)
@given(data=st.data())
@fuzz(25)
def test_a_request_that_was_altered_is_answered_or_refused(node: Node, bystander: Wire, op: str, data: Any) -> None:
    body = data.draw(changed({"id": 1, "op": op, **REQUESTS[op]}))
    with node.wire() as wire:
        wire.hello()
        wire.raw(framed(body))
        answer = wire.frame()
        assert answer["op"] in ANSWERS
        assert served(bystander)
        if answer["op"] == "refused" and "id" not in answer:
            assert answer["why"]
            wire.assert_closed()


@given(data=st.data())
@fuzz(60)
def test_a_hello_that_was_altered_is_welcome_or_refused(node: Node, bystander: Wire, data: Any) -> None:
    hello = identity.Identity(os.getpid(), 0, 0, "wire").hello()
    with node.wire() as wire:
        wire.raw(framed(data.draw(changed(hello))))
        assert wire.frame()["op"] in ("welcome", "refused")
        assert served(bystander)


def test_a_frame_that_is_begun_and_not_ended_ends_its_connection_alone(tmp_path: Path) -> None:
    asked: list[messages.Request] = []
    half = frames.encode_frame({"op": "status", "id": 1})

    async def scenario() -> None:
        there = Connections(
            "agent", Notices(), False, frame_timeout=0.2
        )  # fmt: skip
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "s"))
            close = there.listen(listener, lambda c, n, message: asked.append(message), lambda c: None)
            slow, patient = await peer(tmp_path / "s"), await peer(tmp_path / "s")
            slow[1].write(half[:-1])
            patient[1].write(half)
            answer = await asyncio.wait_for(frame(slow[0]), 20)
            assert answer["op"] == "refused"
            assert "whole" in answer["why"]
            assert await asyncio.wait_for(slow[0].read(), 20) == b""
            await asyncio.sleep(0.5)  # much longer than a frame may take: who is between two frames may wait
            patient[1].write(frames.encode_frame({"op": "status", "id": 2}))
            while len(asked) < 2:
                await asyncio.sleep(0.01)
            assert len(there) == 1
            for _, writer in (slow, patient):
                writer.close()
            while len(there):
                await asyncio.sleep(0.01)
            close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


async def peer(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(frames.encode_frame(identity.Identity(os.getpid(), None, None, "wire").hello()))
    assert (await frame(reader))["op"] == "welcome"
    return reader, writer


async def frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    length = frames.frame_length(await reader.readexactly(frames.HEADER_BYTES))
    return frames.decode_body(await reader.readexactly(length))


# What an agent that lies, or is something else, answers.

PATIENCE = 0.3  # seconds, of the clients here with an agent
WELCOME = {"op": "welcome", "version": "0", "pid": 1, "id": "agent"}
LIES: list[dict[str, Any]] = [
    {"op": "lead", "token": "1.1", "id": 1}, {"op": "ready", "source": "store", "id": 1},
    {"op": "failed", "log": "l", "where": "w", "id": 1}, {"op": "alone", "why": "w", "id": 1}, {"op": "busy", "id": 1},
    {"op": "granted", "id": 1, "granted": True}, {"op": "refused", "why": "w", "id": 1}, {"op": "refused", "why": "w"},
    {"op": "waiting", "id": 1}, {"op": "choice", "content": b"c", "id": 1}, {"op": "choice", "id": 1}, {"op": "done", "id": 1},
    {"op": "facts", "id": 1, "flights": []}, {"op": "done", "id": 1, "told": ["a notice"]},
]  # fmt: skip


class Liar:
    """Listens where an agent would, and answers every connection with `say(connection)`."""

    def __init__(self, path: Path) -> None:
        self.say: Callable[[socket.socket], None] = lambda connection: None
        self._listener = socket.socket(socket.AF_UNIX)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        self._listener.listen(100)
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(20)
        self.hang_up()
        assert not self._thread.is_alive()
        self._listener.close()

    def hang_up(self) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # also for a thread of ours that is sending
            connection.close()
        self._open.clear()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._say, args=(connection,), daemon=True).start()

    def _say(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self.say(connection)


@pytest.fixture
def lied_to() -> Iterator[tuple[Node, Liar]]:
    with Node(spawn="0", agent_timeout=str(PATIENCE), max_wait="0.5") as node:
        liar = Liar(node.path)
        try:
            yield node, liar
        finally:
            liar.close()


CALLS: dict[str, Callable[[AgentClient, Node], Any]] = {
    "claim": lambda client, node: client.claim(KEY, node.home("k")),
    "attempt": lambda client, node: client.claim(KEY, node.home("k"), wait=False),
    "publish": lambda client, node: client.publish(None, KEY, stage(node.home("k")), node.home("k"), 0.5, ""),
    "deliver": lambda client, node: client.ask(messages.Deliver([SPAN]), messages.Done),
    "record": lambda client, node: client.ask(messages.Record("mine", [RECIPE.to_wire()]), messages.Done),
    "lookup": lambda client, node: lookup(client, KEY),
    "offer": lambda client, node: offer(client, KEY, b"choice"),
    "ask": lambda client, node: client.status(),
}
MAY_BE = {
    "claim": (Ready, Lead, Failed, Alone, Busy), "attempt": (Ready, Lead, Failed, Alone, Busy), "publish": (bool,),
    "deliver": (messages.Done, type(None)), "record": (messages.Done, type(None)),
    "lookup": (bytes, type(None)), "offer": (bytes, type(None)),
    "ask": (dict, type(None)),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@given(data=st.data())
@fuzz(25)
def test_an_agent_that_lies_neither_harms_nor_holds_up_a_rank(lied_to: tuple[Node, Liar], call: str, data: Any) -> None:
    node, liar = lied_to
    answer = data.draw(
        st.one_of(
            *(changed(lie).map(framed) for lie in (WELCOME, *LIES)),
            st.binary(max_size=60),
            st.sampled_from(LIES).map(packed).map(framed),
        )
    )
    welcome = framed(packed(WELCOME)) if data.draw(st.integers(0, 9)) else b""
    closes = data.draw(st.booleans())

    def say(connection: socket.socket) -> None:
        connection.sendall(welcome + answer)
        if closes:
            connection.shutdown(socket.SHUT_WR)

    liar.say = say
    client = AgentClient(node.settings, Notices())
    try:
        told = in_thread(lambda: CALLS[call](client, node)).result(20)
        assert isinstance(told, MAY_BE[call])
        if isinstance(told, Lead):
            assert isinstance(told.token, str)
            in_thread(lambda: client.give_up(told, KEY)).result(20)
            told.connection.close()
    finally:
        client.close()
        liar.hang_up()


def test_an_agent_whose_answer_drips_is_taken_for_dead(lied_to: tuple[Node, Liar]) -> None:
    node, liar = lied_to

    def drip(connection: socket.socket) -> None:
        connection.sendall(framed(packed(WELCOME)) + struct.pack(">I", 1 << 20))
        for _ in range(1 << 20):
            connection.sendall(b"\x81")
            time.sleep(PATIENCE / 5)

    liar.say = drip
    answer = in_thread(lambda: AgentClient(node.settings, Notices()).claim(KEY, node.home("k"))).result(20)
    assert isinstance(answer, Alone)
    liar.hang_up()


def test_an_agent_that_says_waiting_for_ever_is_not_waited_for_for_ever(lied_to: tuple[Node, Liar]) -> None:
    node, liar = lied_to

    def beat(connection: socket.socket) -> None:
        connection.sendall(framed(packed(WELCOME)))
        while True:
            connection.sendall(framed(packed({"op": "waiting", "id": 1})))
            time.sleep(PATIENCE / 5)

    liar.say = beat
    for call in ("claim", "lookup"):
        client = AgentClient(node.settings, Notices())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client_module, "_LONGEST_ANSWER", 1.0)
            assert not in_thread(lambda c=client, n=call: CALLS[n](c, node) == Ready("store")).result(20)
        client.close()


@given(lies=st.lists(st.sampled_from(LIES).map(packed) | changed(LIES[0]) | changed(LIES[1]), max_size=4))
@fuzz(25)
def test_a_rank_gets_its_artifact_whatever_its_agent_says(lied_to: tuple[Node, Liar], lies: list[bytes]) -> None:
    node, liar = lied_to
    liar.say = lambda connection: connection.sendall(framed(packed(WELCOME)) + b"".join(map(framed, lies)))
    coordinator = Coordinator(node.settings)
    key = key_of(os.urandom(8).hex())
    try:
        got = in_thread(
            lambda: coordinator.get_or_compile(key, lambda staging: (staging / "kernel.txt").write_text("mine"))
        )
        assert (got.result(20).path / "kernel.txt").read_text() == "mine"
    finally:
        coordinator.close()
        liar.hang_up()


# What files say.


@given(data=st.data())
@fuzz(150)
def test_a_part_of_a_profile_that_was_altered_is_skipped_with_a_line(
    data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("profile")
    part = save_part(directory, [RECIPE])
    start = len(part.read_bytes()) - len(packed([RECIPE.to_wire()]))
    form = part.read_bytes()[:start]
    body = data.draw(changed([RECIPE.to_wire()]))
    part.write_bytes(form[: -hashlib.sha256().digest_size] + hashlib.sha256(body).digest() + body)
    notices = Notices()
    found = list(parts(directory, notices))
    assert found or notices.since(0)[0] or body == packed([])
    assert all(isinstance(r, Recipe) for r in found)


OUTCOMES = [
    {"state": "ready", "manifest": "ab" * 32}, {"state": "failed", "log": "ptxas: no", "where": "node 1"},
]  # fmt: skip


@given(data=st.data())
@fuzz(200)
def test_a_lease_s_outcome_that_was_altered_is_read_or_is_none(data: Any) -> None:
    valid = data.draw(st.sampled_from(OUTCOMES))
    found = lease_files._parse(data.draw(changed(valid)))
    assert found is None or isinstance(found, (leases.Ready, leases.Failed))


# What is nested so deeply that Python cannot print it; hypothesis raises the recursion limit, and would not find it.
