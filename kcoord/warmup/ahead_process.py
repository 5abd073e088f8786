"""Work ahead, the helper's side: compiles keys of a profile while the rank that started it waits (`kcoord.rank.ahead`).

The helper takes the recipes in the order in which the job asked for them, so that the next key is compiled next; it skips a key
that is compiled, or that another rank is compiling. Before each compile it asks the agent for a permit. The rank writes ``go``
and ``rest`` lines to the helper's standard input. The helper ends with the rank: a thread watches the input, and the rank
itself.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from kcoord.backends.fail_open import notices
from kcoord.backends.registry import install
from kcoord.cgroups import free_memory
from kcoord.errors import KcoordError
from kcoord.protocol.messages import Permit, Permitted
from kcoord.rank.client import AgentClient
from kcoord.rank.connect import connect
from kcoord.settings import Settings
from kcoord.warmup.profile_access import recorded
from kcoord.warmup.tasks import Task, tasks_of

_ASK_AGAIN = 0.5  # seconds after a permit was refused


def main(name: str, rank: int) -> None:
    """Compile the rest of the profile `name` for the process `rank`, then end this process."""
    go = threading.Event()
    threading.Thread(target=_follow, args=(go, _taken_stdin(), rank), daemon=True).start()
    try:
        settings = Settings.from_environ()
        tasks = upcoming(settings, name)
        install()
        client = AgentClient(settings, notices)  # of its own: a permit ends with its connection
        work(tasks, go, lambda: permitted(client), client.close)
        client.close()
        connect().close()  # delivers counters and spans
    except KcoordError:
        pass  # a first job has no profile yet
    os._exit(0)  # skips the exit of imported modules, which may wait for their threads, or speak for a rank


def work(tasks: list[Task], go: threading.Event, may: Callable[[], bool], rests: Callable[[], None]) -> None:
    """Run `tasks` one by one, each once `go` is set and ``may()`` is True; ``rests()`` is called before a wait for `go`."""
    for task in tasks:
        if not go.is_set():
            rests()  # another helper may use the permit meanwhile
        go.wait()
        while not may():
            time.sleep(_ASK_AGAIN)
            go.wait()
        try:
            task.run(False)
        except (Exception, SystemExit):  # noqa: BLE001 - the rank meets it too, and reports it, when it needs the key
            continue


def upcoming(settings: Settings, name: str) -> list[Task]:
    """The tasks that need no device of this process, in the order in which the job asked for their keys.

    Raises `KcoordError` if there is no such profile.
    """
    recipes = sorted(recorded(settings, name, notices), key=lambda r: (r.order, r.digest))
    return [task for recipe in recipes if recipe.target for task in tasks_of(recipe)]


def permitted(client: AgentClient) -> bool:
    """True if the agent lets this process compile one more key."""
    answer = client.ask(Permit(free_memory()), Permitted, quietly=True)
    return answer is not None and answer.granted


def _taken_stdin() -> int:
    """Move the standard input to another descriptor, where neither a module nor a compiler reads it by mistake."""
    control, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return control


def _follow(go: threading.Event, control: int, rank: int) -> None:
    """Set and clear `go` as the rank says. Ends this process with the rank."""
    watched = [control, *_pidfd_of(rank)]
    commands = b""
    while True:
        ready, _, _ = select.select(watched, [], [])
        chunk = _read(control) if control in ready else b""
        if not chunk:
            os._exit(0)
        commands = (commands + chunk)[-4096:]
        last = commands.split()[-1:]
        (go.set if last == [b"go"] else go.clear)()


def _read(control: int) -> bytes:
    try:
        return os.read(control, 4096)
    except OSError:  # reset: the rank has ended
        return b""


def _pidfd_of(process: int) -> list[int]:
    """A descriptor that is readable once `process` has ended, even if another process holds its end of the input.

    Empty on a kernel without pidfd.
    """
    try:
        return [os.pidfd_open(process)]
    except ProcessLookupError:
        os._exit(0)
    except OSError:
        return []
