"""A compiler of known output: what it writes for a kernel is a function of the key, but for who wrote it.

`kernel.bin` tells a wrong or torn kernel; `first` and `last`, the first and the last file that a compile writes, tell a mix
of two writers.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from kcoord.keys.cache_key import CacheKey
from kcoord.packs.recipe import Recipe
from tests.chaos.schedule import Kernel

_SLICE = 0.005  # seconds
FILES = {"first", "kernel.bin", "last"}


def key_of(round_name: str, kernel: Kernel) -> CacheKey:
    return CacheKey.of("chaos", kernel.name, round=round_name)


def recipe_of(kernel: Kernel) -> Recipe:
    """By it agents know how long the kernel's compile takes."""
    return Recipe("chaos", "tests", "kernel", kernel.name, "", kernel.seconds, 1)


def expected(key: CacheKey, size: int) -> bytes:
    """What `kernel.bin` holds."""
    block = hashlib.sha256(key.digest.encode()).digest()
    return (block * (size // len(block) + 1))[:size]


def compile_kernel(
    staging: Path,
    key: CacheKey,
    size: int,
    seconds: float,
    meanwhile: Callable[[], None] = lambda: None,
    *,
    spins: bool = False,
) -> None:
    """Take `seconds`, and write; `meanwhile` is called every few milliseconds, with files half written.

    `spins`: the time is spent on the CPU, as a compiler that works does; else it is one that hangs, if it is long.
    """
    writer = f"{os.getpid()}-{uuid.uuid4().hex}"
    content = expected(key, size)
    deadline = time.monotonic() + seconds
    (staging / "first").write_text(writer)
    with (staging / "kernel.bin").open("wb", buffering=0) as file:
        file.write(content[: size // 2])
        meanwhile()
        while (left := deadline - time.monotonic()) > 0:
            if spins:
                _spin(min(left, _SLICE))
            else:
                time.sleep(min(left, _SLICE))
            meanwhile()
        file.write(content[size // 2 :])
    (staging / "last").write_text(writer)


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def fault_of(directory: Path, key: CacheKey, size: int) -> str:
    """What is wrong with the artifact in `directory`; empty if it is right and of one writer."""
    try:
        found = {name: (directory / name).read_bytes() for name in FILES}
    except OSError as error:
        return f"cannot be read: {error}"
    if found["kernel.bin"] != expected(key, size):
        return f"kernel.bin is not what the compiler writes: {len(found['kernel.bin'])} bytes of {size}"
    if not found["first"] or found["first"] != found["last"]:
        return f"two writers: {found['first']!r} and {found['last']!r}"
    return ""
