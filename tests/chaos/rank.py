"""What a rank of a round does: two passes over all kernels, as a backend asks for them, and a look at every byte.

In the first pass kernels are compiled or waited for; the second finds them in the local tier, unless a fault was there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import kcoord
from kcoord.artifacts.local import Artifact
from kcoord.rank.compilation import Compilation
from kcoord.rank.coordinator import Coordinator, Request
from tests.chaos.compiler import compile_kernel, fault_of, key_of, recipe_of
from tests.chaos.journal import Journal
from tests.chaos.schedule import Kernel, Round


class OrderedToRaise(Exception):
    """A compiler that fails."""


class Orders:
    """How this rank is to die in its next compile, left in a file by whoever throws the faults."""

    def __init__(self, path: Path, journal: Journal) -> None:
        self._path, self._journal = path, journal

    def obey(self) -> None:
        try:
            order = self._path.read_text()
        except FileNotFoundError:
            return
        self._path.unlink()
        self._journal.say("obeys", order=order)
        if order == "exit":
            os._exit(3)
        elif order == "segfault":
            ctypes.string_at(0)
        elif order == "raise":
            raise OrderedToRaise("as ordered")
        else:
            os.kill(os.getpid(), signal.SIGKILL if order == "kill" else signal.SIGTERM)


class Rank:
    def __init__(self, round_: Round, directory: Path, node: int, rank: int, life: int) -> None:
        self._round, self._directory, self._order = round_, directory, round_.orders[node][rank]
        self._journal = Journal(directory / f"rank-{node}-{rank}.jsonl")
        self._orders = Orders(directory / f"order-{node}-{rank}", self._journal)
        self._journal.say("begins", pid=os.getpid(), life=life)

    def work(self) -> None:
        """Raises AssertionError if a kernel was wrong twice, and what a compile was ordered to raise."""
        coordinator = kcoord.connect()
        try:
            for number in (*self._order, *self._order):
                self._obtain(coordinator, self._round.kernels[number])
        finally:
            coordinator.close()  # as the interpreter does at its end
        self._journal.say("done")

    def _obtain(self, coordinator: Coordinator, kernel: Kernel) -> None:
        key = key_of(self._round.name, kernel)
        for _ in range(3):
            asked = time.monotonic()
            artifact = self._request(coordinator, kernel)
            wrong = fault_of(artifact.path, key, kernel.size)
            if not wrong:
                return
            # a fault may hit the files after they were verified; then asking again must mend it
            self._journal.say("wrong", kernel=kernel.name, asked=asked, why=wrong, path=str(artifact.path))
        raise AssertionError(f"{kernel.name} stays wrong: {wrong}")

    def _request(self, coordinator: Coordinator, kernel: Kernel) -> Artifact:
        key = key_of(self._round.name, kernel)
        asked = time.monotonic()
        found = coordinator.request(Request(key, coordinator.home(key.digest), recipe=lambda: recipe_of(kernel).digest))
        answered = time.monotonic()
        if isinstance(found, Artifact):
            self._journal.say("served", kernel=kernel.name, asked=asked, took=answered - asked)
            return found
        leads = "hedges" if found.lead is not None and found.lead.hedges else "leads"
        how = leads if found.lead else "failed" if found.failed else "alone"
        said = {"kernel": kernel.name, "asked": asked, "how": how, "note": found.note}
        self._journal.say("compiles", **said, took=answered - asked)
        seconds = self._seconds(kernel)
        return found.run(
            lambda staging: compile_kernel(staging, key, kernel.size, seconds, self._orders.obey, spins=kernel.spins),
            lambda _: self._publish(found, said),
        )

    def _publish(self, compilation: Compilation, said: dict[str, object]) -> Artifact:
        begun = time.monotonic()
        artifact = compilation.publish()
        took = time.monotonic() - begun
        self._journal.say("compiled", **said, outcome=compilation.outcome, published=begun, took=took)
        return artifact

    def _seconds(self, kernel: Kernel) -> float:
        if not kernel.hangs:
            return kernel.seconds
        try:
            (self._directory / f"hung-{kernel.name}").touch(exist_ok=False)
        except FileExistsError:
            return kernel.seconds
        return kernel.seconds + kernel.hangs
