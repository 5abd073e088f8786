"""Messages: encoded and parsed by the same types, and refused where a field is missing or wrong."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from kcoord.errors import ProtocolError
from kcoord.keys.cache_key import CacheKey
from kcoord.protocol import fields, frames, messages
from kcoord.protocol.messages import Answer, Request, parse_answer, parse_request

KEY = CacheKey.of("test", "kernel", source="text")
HOME, STAGING = Path("/homes/a"), Path(os.fsdecode(b"/homes/\xff"))
REQUESTS: list[Request] = [
    messages.Claim(KEY.digest, "test", "kernel", HOME),
    messages.Claim(KEY.digest, "test", "kernel", HOME, wait=False),
    messages.Publish(KEY, "1.1", STAGING, HOME, 0.5, "cuda:90#0"),
    messages.Fail(KEY.digest, "1.1", "no registers"),
    messages.GiveUp(KEY.digest, "1.1"),
    messages.Lookup(KEY.digest),
    messages.Offer(KEY, b"choice", 1.0, ""),
    messages.Measure(KEY.digest, 3),
    messages.Measure(KEY.digest, 3, 1, b"timing"),
    messages.Record("mine", [{"a": 1}]),
    messages.Deliver(),
    messages.Deliver([["a span"]], 3),
    messages.Profile("mine"),
    messages.Profile("mine", sees_store=False),
    messages.Announce(),
    messages.Announce([{"a": 1}], "mine", 1, 2, 8.0, ["kernels"], "cuda:90"),
    messages.Join(),
    messages.Take(1 << 30, 8.0, 1e6),
    messages.Take(1 << 30, 0.5, 0.0, "failed", "why", last=True),
    messages.Next(),
    messages.Next("compiled"),
    messages.Status(),
    messages.Stats(),
    messages.Stats("job"),
    messages.Stop(),
    messages.Attend("a job"),
    messages.Leave(),
    messages.HandOver(),
]
ANSWERS: list[Answer] = [
    messages.Ready("wait"),
    messages.Lead("1.1"),
    messages.Lead("1.2", hedges=True),
    messages.Failed("log", "node 2"),
    messages.Alone("why"),
    messages.BUSY,
    messages.Done(),
    messages.Refused("why"),
    messages.Choice(),
    messages.Choice(b"choice"),
    messages.Measurements(1),
    messages.Measurements(timings=[b"a", None]),
    messages.ProfileState(checked=True, late=False),
    messages.Granted(granted=False),
    messages.Granted(granted=False, modules=["kernels"]),
    messages.Joined(4, ["kernels"]),
    messages.Work({"a": 1}),
    messages.Work(over=True),
    messages.Left(last=True, last_of_job=True, ends=7),
    messages.Facts({"flights": [], "notices": ["a line"]}),
]


def on_the_wire(message: Request | Answer) -> dict[str, Any]:
    frame = frames.encode_frame(message.to_wire(7))
    return frames.decode_body(frame[frames.HEADER_BYTES :])


def test_every_kind_of_message_is_tested() -> None:
    assert {type(m) for m in REQUESTS} == set(Request.ops.values())
    assert {type(m) for m in ANSWERS} == set(Answer.ops.values())


@pytest.mark.parametrize("message", REQUESTS, ids=lambda m: m.op)
def test_a_request_comes_out_as_it_went_in(message: Request) -> None:
    assert parse_request(on_the_wire(message)) == (7, message)


@pytest.mark.parametrize("message", ANSWERS, ids=lambda m: m.op)
def test_an_answer_comes_out_as_it_went_in(message: Answer) -> None:
    assert parse_answer(on_the_wire(message)) == message


def test_busy_is_one_object() -> None:
    assert parse_answer(on_the_wire(messages.BUSY)) is messages.BUSY


@pytest.mark.parametrize("message", REQUESTS, ids=lambda m: m.op)
def test_a_request_without_a_field_that_has_no_default_is_refused(message: Request) -> None:
    for field in dataclasses.fields(message):
        wire = on_the_wire(message)
        wire.pop(field.name, None)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            with pytest.raises(ProtocolError):
                parse_request(wire)
        else:
            assert type(parse_request(wire)[1]) is type(message)


@pytest.mark.parametrize(
    ("message", "name", "value"),
    [
        (messages.Lookup(KEY.digest), "digest", KEY.digest[:-1]),
        (messages.Lookup(KEY.digest), "digest", KEY.digest.upper()),
        (messages.Claim(KEY.digest, "b", "n", HOME), "wait", 1),
        *(
            (messages.Claim(KEY.digest, "b", "n", HOME), "home", p)
            for p in ("homes/a", "/a/../b", "/nul\0", "/\ud800", "")
        ),
        (messages.Offer(KEY, b"", 1.0, ""), "seconds", float("nan")),
        (messages.Offer(KEY, b"", 1.0, ""), "seconds", True),
        (messages.Measure(KEY.digest, 3), "count", True),
        (messages.Measure(KEY.digest, 3, 1, b""), "timing", "text"),
        (messages.Take(1, 1, 1), "memory", True),
        (messages.Take(1, 1, 1), "idle", -1),
        (messages.Take(1, 1, 1), "left", float("nan")),
        (messages.Deliver(), "spans", "many"),
        (messages.Deliver(), "dropped", -1),
        (messages.Status(), "id", True),
        (messages.Status(), "op", "nonsense"),
        (messages.Status(), "op", ["status"]),
    ],
)
def test_a_request_with_a_wrong_field_is_refused(message: Request, name: str, value: object) -> None:
    with pytest.raises(ProtocolError):
        parse_request({**on_the_wire(message), name: value})


def test_texts_for_people_are_short_and_print() -> None:
    _, claim = parse_request(on_the_wire(messages.Claim(KEY.digest, "b" * 999, "\x1b[31m", HOME)))
    assert isinstance(claim, messages.Claim)
    assert len(claim.backend) == 200
    assert claim.name.isprintable()
    _, fail = parse_request(on_the_wire(messages.Fail(KEY.digest, "1", "x\udcff" * fields.LONGEST_LOG)))
    assert isinstance(fail, messages.Fail)
    assert len(fail.log) == fields.LONGEST_LOG
    assert fail.log.encode()


def test_a_path_that_is_too_long_is_not_remembered() -> None:
    before = fields._absolute.cache_info().currsize
    with pytest.raises(ProtocolError, match="absolute path"):
        fields.directory({"home": "/" + "x" * (1 << 20)}, "home")
    assert fields._absolute.cache_info().currsize == before
