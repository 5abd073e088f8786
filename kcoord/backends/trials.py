"""Examines compilers: the parts that kcoord does not hook, and by a trial whether a compile reaches kcoord, and comes back.

A compiler is imported and tried in a process of its own. That takes seconds: ``kcoord doctor`` and the tests of releases do it,
and no rank.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

from kcoord.backends.fail_open import notices
from kcoord.backends.registry import compiler_of, install, replayer
from kcoord.backends.reliances import asides
from kcoord.default_dir import private_places, takes_libraries
from kcoord.interruption import let_through
from kcoord.rank.connect import connect
from kcoord.rank.pool_start import NO_GPU

_LONGEST = 60.0  # seconds
_ROOM = 16 << 20  # bytes; Inductor's trial writes 0.3 MiB
_MOST = 200  # characters of an exception


class Examined(NamedTuple):
    """`faults`: each with its release, module or compiler. `seconds` of the trial; None if there is none, or it raised."""

    faults: Sequence[tuple[str, str]]
    seconds: float | None


def examine(name: str, modules: Iterable[str], python: str = sys.executable) -> Examined:
    """Import `modules` of the compiler `name` in a process of `python`, and run its trial. A crash, or 60 s, is a fault.

    The node's agent, its files and the compiler's own caches are left alone.
    """
    environ = {n: v for n, v in os.environ.items() if not n.startswith("KCOORD_") and not n.endswith("_CACHE_DIR")}
    pipe, root = subprocess.PIPE, next((each for each in private_places() if takes_libraries(each, _ROOM)), None)
    try:
        with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as place, subprocess.Popen(
            [python, "-P", "-c", "from kcoord.backends.trials import main; main()", name, *modules],
            env={**environ, **NO_GPU, "KCOORD_LOCAL_DIR": place, "KCOORD_SPAWN": "0", "TMPDIR": place, "XDG_CACHE_HOME": place},
            stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
            try:
                out, err = process.communicate(timeout=_LONGEST)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    except subprocess.TimeoutExpired:
        out, err = "", f"it took more than {_LONGEST:.0f} s"
    except OSError as error:
        out, err = "", str(error)
    try:
        faults, seconds = json.loads(out.rstrip().rpartition("\n")[2])
        return Examined([(what, fault) for what, fault in faults], seconds)
    except (TypeError, ValueError):
        why = (err.splitlines() or [f"exit code {process.returncode}"])[-1]
        return Examined([(name, f"not known: {why}")], None)


# In the compiler's process.


def main() -> None:
    """Examine the compiler of the first argument, whose modules are the others, and print a line of JSON."""
    install()
    name, *modules = sys.argv[1:]
    raised = [(each, f"it cannot be imported: {why}") for each in modules if (why := _attempt(import_module, each)[1])]
    off, declared, found, begun = parts_off(name), compiler_of(name), None, time.perf_counter()
    if declared is not None and declared.backend and not raised:
        found, why = _attempt(_fault, name)
        raised += [(name, f"its trial failed: {found or why}")] if found or why else []
    seconds = None if found is None else time.perf_counter() - begun
    line = json.dumps([[*off, *raised], seconds])
    sys.stdout.write(f"\n{line}\n")


def _attempt(call: Callable[[str], Any], name: str) -> tuple[Any, str]:
    """``call(name)``, and the exception that it has raised."""
    try:
        return call(name), ""
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything
        let_through(error)
        return None, " ".join(f"{type(error).__name__}: {error}".split())[:_MOST]


def parts_off(name: str) -> list[tuple[str, str]]:
    """The parts of a compiler that this process does not hook: its release, and the reason."""
    return [(release, f"{part} off: {why}") for (each, part), (release, why) in asides.items() if each == name]


def _fault(name: str) -> str | None:
    """The fault of a compiler's trial, empty if there is none; None if it has no trial.

    The first compiles are published on this node, and the second ones are answered with that.
    """
    backend = replayer(name)
    _, before = notices.since(0)
    first, second = backend.trial(), backend.trial()
    told, _ = notices.since(before)
    figures = connect().counters.read()
    compiled, loaded = figures["compiles"], figures["local_hits"] + figures["memory_hits"]
    if told or (compiled, loaded) == (first, second):
        return told[0] if told else "" if first else None
    return f"of {first} compiles {compiled} reached kcoord, and {loaded} came back"
