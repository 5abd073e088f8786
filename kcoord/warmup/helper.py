"""``python -m kcoord.warmup.helper NAME SYS_PATH``: compiles keys of profile NAME while the rank that started it waits.

The rank writes ``go`` and ``rest`` lines to its standard input. It takes the recipes in the order in which the job asked for
them, so that what comes next is compiled next; what is there, or what another rank is at, is passed over. Before each compile it
asks the agent for a permit. It ends with the rank, at once: the watching thread sees the pipe's end, or another parent.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable

from kcoord.agent.client import AgentClient
from kcoord.backends.base import notices
from kcoord.backends.install import install
from kcoord.errors import KcoordError
from kcoord.profiles.parts import load_profile
from kcoord.settings import Settings
from kcoord.warmup.tasks import Task, tasks_of

_LOOK = 1.0  # seconds between two looks at the parent
_ASK_AGAIN = 0.5  # seconds after a permit was refused


def main(name: str, path: str) -> int:
    sys.path[:] = json.loads(path)
    go = threading.Event()
    threading.Thread(target=_obey, args=(go, os.getppid()), daemon=True).start()
    settings = Settings.from_environ()
    try:
        tasks = upcoming(settings, name)
        install()
    except KcoordError:
        return 0  # a first job has none yet
    permits = AgentClient(settings, notices)  # of its own: a permit ends with its connection
    work(tasks, go, lambda: permitted(permits))
    permits.close()
    return 0


def work(tasks: list[Task], go: threading.Event, may: Callable[[], bool]) -> None:
    """Run `tasks`, each while `go` is set, and as soon as `may` says so."""
    for task in tasks:
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
    recipes = sorted(load_profile(settings, name, notices), key=lambda r: (r.order, r.digest))
    return [task for recipe in recipes if recipe.target for task in tasks_of(recipe)]


def permitted(client: AgentClient) -> bool:
    """Whether the agent lets this process compile one more key."""
    reply = client.ask({"op": "permit"}, quietly=True)
    return reply is not None and reply.get("op") == "permit" and reply.get("granted") is True


def _obey(go: threading.Event, parent: int) -> None:
    commands = b""
    while True:
        ready, _, _ = select.select([0], [], [], _LOOK)
        if ready:
            chunk = os.read(0, 4096)
            if not chunk:
                os._exit(0)
            commands = (commands + chunk)[-4096:]
            last = commands.split()[-1:]
            (go.set if last == [b"go"] else go.clear)()
        elif os.getppid() != parent:
            os._exit(0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
