"""A node's launcher: ``python -m tests.chaos.node DIRECTORY NODE`` runs its ranks, and replaces one that dies.

The round is ``DIRECTORY/round.json``. Exit code 0 once every rank has done its work.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

import kcoord.rank.coordinator  # noqa: F401 - imported once, before the forks
from tests.chaos.journal import Journal
from tests.chaos.kinds import RANKS
from tests.chaos.rank import Rank
from tests.chaos.schedule import Round

_MOST_DEATHS = 100


def main(directory: Path, node: int) -> int:
    round_ = Round.decode((directory / "round.json").read_text())
    journal = Journal(directory / f"node-{node}.jsonl")
    ranks: dict[int, int] = {}  # pid → rank
    lives = [0] * RANKS

    def start(rank: int) -> None:
        lives[rank] += 1
        pid = os.fork()
        if pid == 0:
            os._exit(_live(round_, directory, node, rank, lives[rank]))
        ranks[pid] = rank
        journal.say("started", rank=rank, pid=pid)

    def stop(number: int, frame: object) -> None:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    for rank in range(RANKS):
        start(rank)
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        journal.say("ended", rank=rank, pid=pid, code=code)
        if code == 0:
            continue
        if sum(lives) > _MOST_DEATHS:
            return 1
        start(rank)
    return 0


def _live(round_: Round, directory: Path, node: int, rank: int, life: int) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["RANK"] = str(node * RANKS + rank)
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        Rank(round_, directory, node, rank, life).work()
    except Exception:  # noqa: BLE001 - a rank's last words, as an interpreter says them
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
