"""Work ahead, the helper's side: compiles keys of a profile while the rank that started it waits (`kcoord.rank.ahead`).

The rank writes ``go`` and ``rest`` lines to its standard input. It takes the recipes in the order in which the job asked for
them, so that what comes next is compiled next; what is there, or what another rank is at, is passed over. Before each compile it
asks the agent for a permit. It ends with the rank: a thread watches the rank's end of the input, and the rank itself.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from kcoord.backends.base import notices
from kcoord.backends.registry import install
from kcoord.cgroups import free_memory
from kcoord.errors import KcoordError
from kcoord.profiles.parts import load_profile
from kcoord.protocol.messages import Permit, Permitted
from kcoord.rank.client import AgentClient
from kcoord.rank.connect import connect
from kcoord.settings import Settings
from kcoord.warmup.profile_access import readable
from kcoord.warmup.tasks import Task, tasks_of

_ASK_AGAIN = 0.5  # seconds after a permit was refused


def main(name: str, rank: int) -> None:
    """Compile what is left of the profile `name`, for the process `rank`, then end this process."""
    go = threading.Event()
    threading.Thread(target=_obey, args=(go, _input_of_ones_own(), rank), daemon=True).start()
    try:
        settings = Settings.from_environ()
        tasks = upcoming(settings, name)
        install()
        permits = AgentClient(settings, notices)  # of its own: a permit ends with its connection
        work(tasks, go, lambda: permitted(permits), permits.close)
        permits.close()
        connect().close()  # it has something to report
    except KcoordError:
        pass  # a first job has no profile yet
    os._exit(0)  # not by way of the modules that were imported: they may wait for their threads, or speak for a rank


def work(tasks: list[Task], go: threading.Event, may: Callable[[], bool], rests: Callable[[], None]) -> None:
    """Run `tasks`, each while `go` is set, and as soon as `may` says so; ``rests()`` is called before a wait for `go`."""
    for task in tasks:
        if not go.is_set():
            rests()  # what this one may do, another one may meanwhile
        go.wait()
        while not may():
            time.sleep(_ASK_AGAIN)
            go.wait()
        try:
            task.run(False)
        except (Exception, SystemExit):  # noqa: BLE001 - whatever it is, the rank meets it, and says so, when it comes to it
            continue


def upcoming(settings: Settings, name: str) -> list[Task]:
    """The tasks that need no device of this process, in the order in which the job asked for their keys.

    Raises `KcoordError` if there is no such profile.
    """
    recipes = sorted(load_profile(readable(settings, name), name, notices), key=lambda r: (r.order, r.digest))
    return [task for recipe in recipes if recipe.target for task in tasks_of(recipe)]


def permitted(client: AgentClient) -> bool:
    """Whether the agent lets this process compile one more key."""
    answer = client.ask(Permit(free_memory()), Permitted, quietly=True)
    return answer is not None and answer.granted


def _input_of_ones_own() -> int:
    """The standard input, moved to where neither a module nor a compiler reads it by mistake."""
    control, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return control


def _obey(go: threading.Event, control: int, rank: int) -> None:
    watched = [control, *_life_of(rank)]
    commands = b""
    while True:
        ready, _, _ = select.select(watched, [], [])
        chunk = _received(control) if control in ready else b""
        if not chunk:
            os._exit(0)
        commands = (commands + chunk)[-4096:]
        last = commands.split()[-1:]
        (go.set if last == [b"go"] else go.clear)()


def _received(control: int) -> bytes:
    try:
        return os.read(control, 4096)
    except OSError:  # reset: the rank has gone
        return b""


def _life_of(process: int) -> list[int]:
    """What is readable once `process` has ended, whoever else holds its end of the input; nothing if the kernel has no pidfd."""
    try:
        return [os.pidfd_open(process)]
    except ProcessLookupError:
        os._exit(0)
    except OSError:
        return []
