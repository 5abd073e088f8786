"""``python -m kcoord.warmup NAME [TARGET …]``: one worker process of ``kcoord warmup``. Prints a line of JSON after each key."""

from __future__ import annotations

import dataclasses
import json
import sys

from kcoord.backends.registry import install
from kcoord.errors import KcoordError
from kcoord.rank.connect import connect
from kcoord.warmup.runner import warmup


def main(name: str, *targets: str) -> int:
    sys.path.insert(0, "")  # modules of the project, as under `python -m`
    install()

    def compiled() -> int:
        return int(connect().counters.read()["compiles"])

    try:
        report = warmup(
            name, targets=targets, progress=lambda done, total: _say({"done": done, "compiled": compiled()})
        )
    except (KcoordError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    connect().close()
    _say({"report": dataclasses.asdict(report), "alone": int(connect().counters.read()["alone"])})
    return 0


def _say(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
