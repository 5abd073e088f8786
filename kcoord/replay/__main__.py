"""``python -m kcoord.replay NAME WORKERS SHOWS [TARGET …]``: a process of ``kcoord warmup``. Prints one line of JSON at its end.

`SHOWS` is 1 for a process that may show the progress.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys

from kcoord.backends.registry import install
from kcoord.errors import KcoordError
from kcoord.rank.connect import connect
from kcoord.replay.warmup import warmup


def main(name: str, workers: str, shows: str, *targets: str) -> int:
    out = os.dup(1)
    os.dup2(2, 1)  # modules and compilers may print
    sys.path.insert(0, "")  # modules of the project, as under `python -m`
    install()
    try:
        report = warmup(
            name, targets=targets, progress=shows == "1", workers=int(workers), tell=str
        )  # the command tells all
    except (KcoordError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    alone = int(connect().counters.read()["alone"])
    connect().close()
    with open(out, "w") as stream:  # noqa: PTH123 - a descriptor
        json.dump({**dataclasses.asdict(report), "alone": alone}, stream)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
