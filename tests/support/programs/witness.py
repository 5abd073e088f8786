"""Tells how it was started."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys


def found(queue: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    queue.put("a child found my function")


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=found, args=(queue,))
    child.start()
    spawned = queue.get(timeout=60)
    child.join()
    line = json.dumps(
        {
            "argv": sys.argv,
            "name": __name__,
            "file": __file__,
            "path0": sys.path[0],
            "package": __package__,
            "rank": os.environ.get("RANK"),
            "spawned": spawned,
        }
    )
    sys.stdout.write(line + "\n")  # in one piece: ranks share a pipe
