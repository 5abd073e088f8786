"""In every Python process of a round: SIGUSR1 writes all threads' stacks, SIGUSR2 all asyncio tasks', to $CHAOS_STACKS/<pid>."""

import asyncio
import faulthandler
import os
import signal


def _tasks(number, frame):  # type: ignore[no-untyped-def]
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    with open(os.path.join(os.environ["CHAOS_STACKS"], f"{os.getpid()}.tasks"), "a") as file:  # noqa: PTH118, PTH123
        for task in asyncio.all_tasks(loop):
            task.print_stack(file=file)


_files = []


def _register():  # type: ignore[no-untyped-def]
    path = os.path.join(os.environ["CHAOS_STACKS"], f"{os.getpid()}.threads")  # noqa: PTH118
    _files.append(open(path, "a"))  # noqa: PTH123, SIM115 - for as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=_files[-1], all_threads=True)
    signal.signal(signal.SIGUSR2, _tasks)


if "CHAOS_STACKS" in os.environ:
    _register()
    os.register_at_fork(after_in_child=_register)
