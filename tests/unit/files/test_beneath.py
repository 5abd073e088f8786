"""Removing and renaming beneath a directory that others may write to."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kcoord.files import beneath

ROOT = Path(__file__).resolve().parents[3]
BY_PATH = re.compile(r"rmtree\(|\.(unlink|rmdir|rename|replace)\((?!.*\")")
"""A call that removes or renames by a path. One with a text for an argument changes a text."""
ON_THE_NODE = {
    "cli/jobs.py", "cli/keys.py", "keys/tools/machine_cache.py", "protocol/endpoint.py", "rank/compilation.py",
    "rank/directories.py", "retention/local_collector.py", "telemetry/span_files.py", "artifacts/local.py",
    "packs/exchange.py", "packs/pack_files.py", "files/sweep.py", "backends/cc/adapter.py",
    "backends/inductor/worker_pool.py", "backends/ninetoothed/adapter.py", "default_dir.py", "keys/function/unimported.py",
}  # fmt: skip
"""Files whose calls by path are of directories of this user's own."""
_OTHERS = (
    "dir_fd=",
    "dataclasses.replace(",
    "code.replace(",
    "each.replace(",
    "text.replace(",
    "content.replace(",
    "beneath.",
)


def test_what_lies_below_a_store_is_removed_and_renamed_by_descriptors_alone() -> None:
    found = {
        str(path.relative_to(ROOT / "kcoord"))
        for path in (ROOT / "kcoord").rglob("*.py")
        for line in path.read_text().splitlines()
        if BY_PATH.search(line) and not any(word in line for word in _OTHERS)
    }
    assert found - {name for name in found if name.startswith("testing/")} <= {*ON_THE_NODE, "files/beneath.py"}


def test_a_link_on_the_way_is_refused_and_one_at_the_root_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there" / "a" / "b").mkdir(parents=True)
    (tmp_path / "root").symlink_to(tmp_path / "there")
    root = tmp_path / "root"
    (root / "a" / "file").write_text("x")
    beneath.rename(root / "a" / "file", root / "a" / "b" / "file", root)
    (root / "linked").symlink_to(root / "a")
    for attempt in (
        lambda: beneath.rename(root / "linked" / "b" / "file", root / "file", root),
        lambda: beneath.unlink(root / "linked" / "b" / "file", root),
        lambda: beneath.rmdir(root / "linked" / "b", root),
        lambda: beneath.mkdir(root / "linked" / "c", root),
        lambda: beneath.touched(root / "linked", root),
        lambda: list(beneath.listed(root / "linked", root)),
        lambda: beneath.lstat(root / "linked" / "b", root),
    ):
        with pytest.raises(NotADirectoryError):
            attempt()
    assert not beneath.remove(root / "linked" / "b", root)
    assert (root / "a" / "b" / "file").read_text() == "x"


def test_a_tree_is_removed_with_its_links_and_not_what_they_name(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    (tmp_path / "tree" / "a" / "b").mkdir(parents=True)
    (tmp_path / "tree" / "a" / "link").symlink_to(tmp_path / "kept")
    os.mkfifo(tmp_path / "tree" / "pipe")
    assert beneath.remove(tmp_path / "tree", tmp_path)
    assert not (tmp_path / "tree").exists()
    assert (tmp_path / "kept" / "file").exists()
    assert not beneath.remove(tmp_path / "tree", tmp_path)


def test_a_tree_that_is_too_deep_stays_and_raises_nothing(tmp_path: Path) -> None:
    deep = tmp_path / "tree"
    deep.joinpath(*["d"] * 300).mkdir(parents=True)
    assert not beneath.remove(deep, tmp_path)
    assert deep.exists()


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    (tmp_path / "a").mkdir()
    for _ in range(10):
        next(beneath.listed(tmp_path, tmp_path))
        with pytest.raises(FileNotFoundError):
            beneath.unlink(tmp_path / "a" / "missing" / "file", tmp_path)
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208
