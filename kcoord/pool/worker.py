"""One worker of the pool: takes a recipe from the agent, compiles it under single flight, and takes the next."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from kcoord.backends.fail_open import notices
from kcoord.backends.registry import compiler_of
from kcoord.cgroups import IdleCores, free_memory
from kcoord.interruption import let_through
from kcoord.profiles.recipe import Recipe
from kcoord.protocol.messages import Take, Work
from kcoord.rank.client import AgentClient
from kcoord.rank.connect import connect
from kcoord.settings import Settings
from kcoord.warmup.tasks import tasks_of

OVER = 3
"""The exit code of a worker of a pool that has nothing left to do, or whose agent is gone."""
_GROWN = 1 << 30  # bytes that a worker may grow by; then another one takes its place
_AGENT_RETURNS = 20.0  # seconds; a launcher restarts an agent that died
_ASK_AGAIN = 0.5  # seconds


def work(settings: Settings, cores: IdleCores, busy: Callable[[bool], object]) -> int:
    """Compile what the agent gives, until it says that it is over, or this process has grown. Returns the exit code.

    ``busy(False)`` is called when it waits for work, first and after each compile; ``busy(True)`` when a compile begins.
    """
    client = AgentClient(settings, notices)
    try:
        return _work(client, cores, busy)
    finally:
        connect().close()  # delivers counters and spans, which are a worker's while `client` is connected
        client.close()


def _work(client: AgentClient, cores: IdleCores, busy: Callable[[bool], object]) -> int:
    size = psutil.Process().memory_info().rss
    ended = why = ""
    heard = time.monotonic()
    busy(False)
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
            busy(True)
            ended, why = compiled(given.recipe, given.moved)
            busy(False)
            if psutil.Process().memory_info().rss > size + _GROWN:
                client.ask(Take(0, 0, 0, ended, why, last=True), Work, quietly=True, start=False)
                return 0


def compiled(recipe: object, moved: bool = False) -> tuple[str, str]:
    """``compiled``, ``loaded``, ``busy`` (another process of the job is at it) or ``failed``, and then why.

    A recipe's module may raise anything, even SystemExit, and so may its compiler: the rank that needs the key meets it too.
    """
    try:
        parsed = Recipe.from_wire(recipe)
        if not parsed.target:
            return "failed", f"{parsed.qualname}: its GPU is the current one, and a pool has none"
        compiler = compiler_of(parsed.backend)
        if moved and compiler is not None and not compiler.portable:
            return "failed", f"{parsed.qualname}: recorded on another GPU, for which alone it holds"
        (task,) = tasks_of(parsed) or (None,)
        return ("failed", f"no backend {parsed.backend!r}") if task is None else (task.run(False), "")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - see above
        let_through(error)
        return "failed", f"{type(error).__name__}: {error}".partition("\n")[0]
