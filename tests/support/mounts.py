"""Mounts for the time of a test; a test is skipped where this user or machine cannot mount."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def mount(where: Path, *options: str) -> None:
    """Skips where this user or machine cannot mount."""
    where.mkdir(exist_ok=True, parents=True)
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command")
    done = subprocess.run(["mount", *options, str(where)], capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")


def unmount(where: Path) -> None:
    subprocess.run(["umount", "-l", str(where)], check=True, timeout=30)


@contextlib.contextmanager
def mounted(where: Path, *options: str) -> Iterator[Path]:
    mount(where, *options)
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], capture_output=True, timeout=30)  # a test may have done so


@contextlib.contextmanager
def tmpfs(where: Path, size: str) -> Iterator[Path]:
    with mounted(where, "-t", "tmpfs", "-o", f"size={size}", "kcoord-test") as there:
        yield there


def read_only(where: Path) -> None:
    subprocess.run(["mount", "-o", "remount,bind,ro", str(where)], check=True, timeout=30)
