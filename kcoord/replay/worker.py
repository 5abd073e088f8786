"""One worker of the pool: takes a recipe from the agent, compiles it under single flight, and takes the next."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from kcoord.backends.fail_open import notices
from kcoord.cgroups import IdleCores, free_memory
from kcoord.packs.recipe import Recipe
from kcoord.protocol.messages import Take, Work
from kcoord.rank.client import AgentClient
from kcoord.rank.connect import connect
from kcoord.replay.recipes import name_of, replayed
from kcoord.settings import Settings

OVER = 3
"""The exit code of a worker of a pool that has nothing left to do, or whose agent is gone."""
_AGENT_RETURNS = 20.0  # seconds; a launcher restarts an agent that died
_ASK_AGAIN = 0.5  # seconds


IDLE, BUSY, MISSES = b"-", b"+", b"!"
"""A worker's state: it waits for work; it has some; its key is not on this node, and others may not be, either."""


def work(settings: Settings, cores: IdleCores, say: Callable[[bytes], object], grown: int) -> int:
    """Compile what the agent gives, until it says that it is over, or this process has grown by `grown` bytes, and another takes
    its place. Returns the exit code.

    ``say(state)`` is called for each of the states above.
    """
    client = AgentClient(settings, notices)
    connect().pool.at_miss = lambda: say(MISSES)
    try:
        return _work(client, cores, say, grown)
    finally:
        connect().close()  # delivers counters and spans, which are a worker's while `client` is connected
        client.close()


def _work(client: AgentClient, cores: IdleCores, say: Callable[[bytes], object], grown: int) -> int:
    size = psutil.Process().memory_info().rss
    ended = why = ""
    heard = time.monotonic()
    say(IDLE)
    while True:
        given = client.ask(Take(free_memory(), *cores.look(), ended, why), Work, quietly=True, start=False)
        if given is None:
            if time.monotonic() - heard > _AGENT_RETURNS:
                return OVER
            time.sleep(_ASK_AGAIN)
            continue
        heard, ended, why = time.monotonic(), "", ""
        if given.over:
            return OVER
        if given.recipe is not None:
            say(BUSY)
            ended, why = compiled(given.recipe)
            say(IDLE)
            if psutil.Process().memory_info().rss > size + grown:
                client.ask(Take(0, 0, 0, ended, why, last=True), Work, quietly=True, start=False)
                return 0


def compiled(recipe: object) -> tuple[str, str]:
    """As `replayed`, for a recipe from the agent. The reason of a failure names the recipe."""
    try:
        parsed = Recipe.from_wire(recipe)
    except ValueError as error:
        return "failed", f"ValueError: {error}"
    how, why = replayed(parsed)
    return how, why and f"{name_of(parsed)}: {why}"
