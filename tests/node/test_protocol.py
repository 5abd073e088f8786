"""Frames, and a real agent that is sent what no client would send. `tests/faults/test_frames.py` alters requests at random."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kcoord.artifacts import local
from kcoord.errors import ProtocolError
from kcoord.protocol import fields, frames
from kcoord.protocol.identity import Identity
from tests.support.agents import Node, hits, key_of, stage, until

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
messages = st.dictionaries(st.text(), values, max_size=6)


@given(messages)
def test_a_frame_comes_out_as_it_went_in(message: dict[str, Any]) -> None:
    frame = frames.encode_frame(message)
    assert frames.frame_length(frame[: frames.HEADER_BYTES]) == len(frame) - frames.HEADER_BYTES
    assert frames.decode_body(frame[frames.HEADER_BYTES :]) == message


@pytest.mark.smoke
def test_a_path_that_is_no_utf8_travels() -> None:
    path = os.fsdecode(b"/home/\xff\xfe/cache")
    frame = frames.encode_frame({"home": path})
    assert frames.decode_body(frame[frames.HEADER_BYTES :]) == {"home": path}


@given(st.binary(max_size=200))
@example(b"")
@example(msgpack.packb([1, 2]))
@example(msgpack.packb({1: 2}))
@example(msgpack.packb({b"op": 2}))
@example(b"\x81\x91\x01\x01")
@example(b"\x91" * 5000)
def test_a_body_is_a_map_or_a_protocol_error(body: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert all(isinstance(k, str) for k in frames.decode_body(body))


def test_a_frame_that_is_too_large_is_not_sent_and_not_read() -> None:
    with pytest.raises(ProtocolError, match="too large"):
        frames.encode_frame({"log": "x" * frames.LARGEST_FRAME})
    with pytest.raises(ProtocolError, match="announces"):
        frames.frame_length(struct.pack(">I", frames.LARGEST_FRAME + 1))
    assert frames.frame_length(struct.pack(">I", frames.LARGEST_FRAME)) == frames.LARGEST_FRAME


# A real agent.


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """One agent for all of these; after each the same agent must still serve."""
    with Node() as node:
        node.start()
        yield node


@pytest.fixture
def serves(node: Node) -> Iterator[None]:
    pid = node.status()["pid"]
    yield
    status = node.status()
    assert status["pid"] == pid, "the agent did not survive"
    assert status["flights"] == []
    until(lambda: node.status()["clients"] == 1)


@pytest.mark.parametrize("content", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\xff" * 100, struct.pack(">I", 0)])
def test_bytes_of_another_protocol_end_the_connection_and_nothing_else(
    node: Node, serves: None, content: bytes
) -> None:
    with node.wire() as wire:
        wire.raw(content)
        wire.socket.shutdown(1)
        wire.assert_closed()


KEY = key_of("fuzzed")
CLAIM = {"op": "claim", "id": 1, "digest": KEY.digest, "backend": "b", "name": "n", "home": "/proc/nowhere/home"}
PUBLISH = {
    "op": "publish", "id": 1, "key": KEY.to_wire(), "token": "", "staging": "/tmp/nowhere/s", "home": "/tmp/nowhere/h",
    "compile_seconds": 1.0, "device": "",
}  # fmt: skip


def test_names_that_a_peer_sends_are_short_where_they_are_shown_and_print(node: Node, serves: None) -> None:
    with node.wire() as wire:
        wire.hello(job="j" * 1_000_000)
        wire.ask({**CLAIM, "backend": "b" * 1_000_000, "name": "\x1b[31m" + "n" * 1_000_000})
        (flight,) = node.status()["flights"]
        backend, _, name = flight["name"].partition(":")
        assert (len(backend), len(name)) == (200, 200)
        assert name.isprintable()
        assert wire.ask({"op": "deliver", "spans": [hits()]})["op"] == "done"
        assert len(wire.ask({"op": "stats"})["job"]) <= fields.LONGEST_JOB
        assert wire.ask({"op": "stats", "job": "j" * 1_000_000})["figures"]["requests"] == 1


@pytest.mark.parametrize("more", [{"name": "n" * 5000}, {"backend": "b" * 5000}], ids=["name", "backend"])
def test_a_key_whose_name_is_endless_is_refused(node: Node, serves: None, more: dict[str, str]) -> None:
    with node.wire() as wire:
        wire.hello()
        wire.send({**PUBLISH, "key": {**KEY.to_wire(), **more}})
        assert "too large" in wire.frame()["why"]
        wire.assert_closed()


def test_a_device_is_short_where_it_is_kept(node: Node, serves: None) -> None:
    home = node.home("device")
    with node.wire() as wire:
        wire.hello()
        wire.ask({**PUBLISH, "home": str(home), "staging": str(stage(home)), "device": "d\ud800" * 100_000})
    artifact = local.open_artifact(home, KEY.digest)
    assert artifact is not None
    assert len(artifact.manifest.origin.device) == 200


def test_a_peer_of_another_version_is_told_so(node: Node, serves: None) -> None:
    with node.wire() as wire:
        wire.send({**Identity(1, None, None, "j").hello(), "protocol": 99})
        answer = wire.frame()
        assert answer["op"] == "refused"
        assert "protocol 99" in answer["why"]
        wire.assert_closed()


def test_a_frame_that_is_too_large_is_refused_before_it_is_read(node: Node, serves: None) -> None:
    with node.wire() as wire:
        wire.hello()
        wire.raw(struct.pack(">I", frames.LARGEST_FRAME + 1))
        answer = wire.frame()
        assert answer["op"] == "refused"
        wire.assert_closed()


def test_the_largest_frame_is_read(node: Node, serves: None) -> None:
    with node.wire() as wire:
        wire.hello()
        message: dict[str, Any] = {"op": "give_up", "id": 1, "digest": KEY.digest, "token": ""}
        message["token"] = "x" * (frames.LARGEST_FRAME - len(frames.encode_frame(message)) - 4)
        assert len(frames.encode_frame(message)) > frames.LARGEST_FRAME - 100
        assert wire.ask(message)["op"] == "done"
