"""Compile functions that a profile can name and `kcoord warmup` can import. They take a while, and note when."""

from __future__ import annotations

import os
import time
from pathlib import Path

import kcoord

SIZE = 4096  # bytes of a kernel


def note(what: str, kernel: int) -> None:
    """One line, in one piece, into this process's file of NOTES; monotonic seconds, which all hosts of a machine share."""
    if "NOTES" in os.environ:
        with Path(os.environ["NOTES"], f"{os.environ['RANK']}-{os.environ.get('LIFE', '0')}").open("a") as file:
            file.write(f"{what} {kernel} {time.monotonic()}\n")


def content(n: int) -> bytes:
    return f"kernel {n}\n".encode().ljust(SIZE, bytes([n % 251]))


@kcoord.compile_once(scope=kcoord.Scope.TARGET, ignore=["NOTES", "RANK", "LIFE", "SECONDS_EACH"])
def make(n: int, *, staging: Path) -> None:
    note("begins", n)
    time.sleep(float(os.environ.get("SECONDS_EACH", "0")))
    (staging / "kernel.bin").write_bytes(content(n))
    note("made", n)
