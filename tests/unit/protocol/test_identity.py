"""The trust that a client expects of its agent, and the agents that it may be served by."""

from __future__ import annotations

import contextlib

import pytest

from kcoord.errors import ProtocolError
from kcoord.protocol.identity import Identity
from kcoord.settings import Settings

KEY, OTHER, FILE = {"signing_key": "main:aa"}, {"signing_key": "other:aa"}, {"signing_key_file": "/secrets/keys"}


def settings(**flags: str) -> Settings:
    return Settings.from_environ({}, **flags)


@pytest.mark.parametrize(
    ("client", "agent", "served"),
    [
        ({}, {}, True),
        ({}, KEY, True),
        ({"trust": "off"}, {**KEY, "trust": "require"}, True),
        ({"trust": "require"}, KEY, True),
        ({"trust": "require"}, {}, False),
        ({"trust": "require"}, {**KEY, "trust": "off"}, False),
        (KEY, KEY, True),
        (KEY, {}, False),
        (KEY, OTHER, False),
        (KEY, {**KEY, "trust": "off"}, False),
        ({**KEY, "trust": "off"}, KEY, True),
        (FILE, FILE, True),
        (FILE, {"signing_key_file": "/secrets/others"}, False),
        ({"trust_keys": "main", "trust": "require"}, KEY, True),
        ({"trust_keys": "/secrets/keys", "trust": "off"}, {**FILE, "trust": "off"}, True),
        ({"trust_keys": "other", "trust": "require"}, KEY, False),
        ({"trust_keys": "/secrets/keys"}, {"trust_keys": "/secrets/keys"}, True),  # neither has what a Secret lacks
    ],
)
def test_an_agent_serves_who_asks_for_no_more_trust_than_it_has(
    client: dict[str, str], agent: dict[str, str], served: bool
) -> None:
    sent = Identity.here(settings(**client), {}).hello()
    refusal = contextlib.nullcontext() if served else pytest.raises(ProtocolError, match="KCOORD_SOCKET of its own")
    with refusal:
        Identity.from_hello(sent).check_trust(settings(**agent))


def test_neither_the_hello_nor_the_refusal_shows_a_secret() -> None:
    asked = Identity.here(settings(signing_key="main:" + "ab" * 32), {})
    with pytest.raises(ProtocolError) as refused:
        asked.check_trust(settings(signing_key="other:" + "cd" * 32))
    shown = f"{asked.hello()} {refused.value}"
    assert "abab" not in shown
    assert "cdcd" not in shown


def test_a_policy_that_the_agent_does_not_know_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no policy"):
        Identity.from_hello({**Identity(1, None, None, "job").hello(), "trust": "strict"})
