"""A tree of sources by its content: warm, it is listed and not read."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kcoord.errors import KeyFactorError
from kcoord.keys.tools import machine_cache, tree
from kcoord.keys.tools.tree import listing_of, tree_fingerprint
from tests.support.sandbox import eventually

_FILES = {"gemm.h": "a", "copy.h": "b", "sm90/gemm.h": "c", "sm90/empty.h": "", "notes.txt": "d"}


def write(root: Path, files: dict[str, str] = _FILES) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write(tmp_path / "include")


@pytest.fixture(autouse=True)
def _another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_known", {})


@pytest.fixture
def old_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of which a change must show, however young they are."""
    monkeypatch.setattr(machine_cache, "_RACY", -1)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read, in the order of reading."""
    paths: list[str] = []

    def hash_file(path: bytes) -> tuple[str, machine_cache.Stamp | None]:
        paths.append(Path(os.fsdecode(path)).name)
        return machine_cache.hash_file(path)

    monkeypatch.setattr(tree, "hash_file", hash_file)
    return paths


_EDITS: dict[str, Callable[[Path], object]] = {
    "a file's content": lambda r: (r / "gemm.h").write_text("A"),
    "a file below": lambda r: (r / "sm90" / "gemm.h").write_text("A"),
    "a new file": lambda r: (r / "new.h").write_text(""),
    "a removed file": lambda r: (r / "sm90" / "empty.h").unlink(),
    "a file's name": lambda r: (r / "gemm.h").rename(r / "gemv.h"),
    "a file's directory": lambda r: (r / "gemm.h").rename(r / "sm90" / "gemv.h"),
    "two files swapped": lambda r: (
        (r / "gemm.h").rename(r / "x"), (r / "copy.h").rename(r / "gemm.h"), (r / "x").rename(r / "copy.h"),
    ),
    "where content ends": lambda r: ((r / "gemm.h").write_text(""), (r / "copy.h").write_text("ab")),
    "a hidden file": lambda r: (r / ".config").write_text("x"),
    "a file in a hidden directory": lambda r: write(r, {".config/deep/x.h": "x"}),
    "a file behind a link": lambda r: (r / "link.h").symlink_to(write(r.parent / "other") / "gemm.h"),
    "a directory behind a link": lambda r: (r / "link").symlink_to(write(r.parent / "other")),
    "a link that leads nowhere": lambda r: (r / "dangling.h").symlink_to("nowhere"),
}  # fmt: skip


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("what", _EDITS)
def test_every_edit_is_noticed_by_the_next_look_and_by_the_next_process(root: Path, local: Path, what: str) -> None:
    before = tree_fingerprint(root, local)
    eventually(lambda: time.time_ns() > (root / "gemm.h").stat().st_ctime_ns + 20_000_000)
    _EDITS[what](root)
    after = tree_fingerprint(root, local)
    assert after != before
    tree._known.clear()
    assert tree_fingerprint(root, local) == after


_NO_EDITS: dict[str, Callable[[Path], object]] = {
    "a repository of git": lambda r: write(r / ".git", {"objects/ab": "x"}),
    "a worktree of git": lambda r: write(r, {"sm90/.git": "gitdir: /elsewhere"}),
    "a repository of Mercurial": lambda r: write(r / ".hg", {"store/ab": "x"}),
    "a repository of Subversion": lambda r: write(r / "sm90" / ".svn", {"wc.db": "x"}),
    "compiled Python": lambda r: write(r, {"__pycache__/a.cpython-311.pyc": "x", "a.pyc": "x"}),
    "a socket or a pipe": lambda r: os.mkfifo(r / "pipe"),
    "an empty directory": lambda r: (r / "empty").mkdir(),
    "modes and times": lambda r: ((r / "gemm.h").chmod(0o600), os.utime(r / "gemm.h", (1, 1))),
}


@pytest.mark.parametrize("what", _NO_EDITS)
def test_what_no_compiler_reads_does_not_matter(root: Path, local: Path, what: str) -> None:
    before = tree_fingerprint(root, local)
    _NO_EDITS[what](root)
    assert tree_fingerprint(root, local) == before


def test_an_equal_tree_elsewhere_is_equal(root: Path, local: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "elsewhere" / "copy")
    assert tree_fingerprint(tmp_path / "elsewhere" / "copy", local) == tree_fingerprint(root, local)
    assert tree_fingerprint(f"{tmp_path}/elsewhere/../include/", local) == tree_fingerprint(root, local)


def test_a_link_to_a_file_counts_as_the_file(root: Path, local: Path, tmp_path: Path) -> None:
    linked = write(tmp_path / "linked")
    (linked / "gemm.h").rename(tmp_path / "shared.h")
    (linked / "gemm.h").symlink_to(tmp_path / "shared.h")
    assert tree_fingerprint(linked, local) == tree_fingerprint(root, local)
    (tmp_path / "shared.h").write_text("A")
    assert tree_fingerprint(linked, local) != tree_fingerprint(root, local)


@pytest.mark.timeout(30)
def test_loops_end_and_farms_of_links_do_not_explode(root: Path, local: Path) -> None:
    (root / "loop").symlink_to(root)
    (root / "self").symlink_to("self")
    (root / "sm90" / "up").symlink_to("..")
    for level in range(30):  # 2 ** 30 paths
        write(root / f"level{level}", {"x.h": str(level)})
    for level in range(29):
        for name in ("one", "two"):
            (root / f"level{level}" / name).symlink_to(root / f"level{level + 1}")
    before = tree_fingerprint(root, local)
    (root / "level29" / "x.h").write_text("changed")
    assert tree_fingerprint(root, local) != before


@pytest.mark.usefixtures("old_files")
def test_a_warm_look_reads_nothing_and_a_change_is_all_that_is_read(root: Path, local: Path, read: list[str]) -> None:
    first = tree_fingerprint(root, local)
    assert sorted(read) == ["copy.h", "empty.h", "gemm.h", "gemm.h", "notes.txt"]
    read.clear()
    assert tree_fingerprint(root, local) == first
    tree._known.clear()  # another process
    assert tree_fingerprint(root, local) == first
    assert read == []
    (root / "copy.h").write_text("longer")
    tree._known.clear()
    assert tree_fingerprint(root, local) != first
    assert read == ["copy.h"]


def test_young_files_are_read_again_although_their_stamps_have_not_changed(
    root: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = machine_cache.stamp_of((root / "gemm.h").stat())
    for module in (machine_cache, tree):
        monkeypatch.setattr(module, "stamp_of", lambda found: stamp)
    before = tree_fingerprint(root, local)
    (root / "gemm.h").write_text("A")
    assert tree_fingerprint(root, local) != before


def test_patterns_are_of_names(root: Path) -> None:
    headers = listing_of(str(root), ("*.h",))
    assert headers == [listed for listed in listing_of(str(root)) if listed[1].endswith(b".h")] != []
    (root / "notes.txt").write_text("changed")
    assert listing_of(str(root), ("*.h",)) == headers
    both = listing_of(str(root), ("*.h", "*.txt"))
    assert both == listing_of(str(root)) != headers
    (root / "notes.txt").write_text("d")
    assert listing_of(str(root), ("*.h", "*.txt")) != both
    assert listing_of(str(root), ("*.h",)) == headers


def test_a_single_file_is_its_content(root: Path, local: Path) -> None:
    one = tree_fingerprint(root / "gemm.h", local)
    (root / "gemm.h").rename(root / "renamed.h")
    assert tree_fingerprint(root / "renamed.h", local) == one
    (root / "renamed.h").write_text("A")
    assert tree_fingerprint(root / "renamed.h", local) != one


def test_a_missing_root_is_named_with_the_remedy(tmp_path: Path, local: Path) -> None:
    with pytest.raises(KeyFactorError, match=f"^{tmp_path}/missing is missing: name a directory or file that exists"):
        tree_fingerprint(tmp_path / "missing", local)


def test_a_root_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, local: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(KeyFactorError, match="neither a file nor a directory"):
        tree_fingerprint(tmp_path / "pipe", local)


def test_a_file_that_cannot_be_read_is_named_with_the_remedy(
    root: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: bytes) -> tuple[str, machine_cache.Stamp | None]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(tree, "hash_file", refuse)  # the mode of a file stops no root
    with pytest.raises(KeyFactorError) as caught:
        tree_fingerprint(root / "sm90", local)
    assert str(caught.value) == (f"{root}/sm90/empty.h cannot be read (Permission denied): let this user read it")


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_directory_that_cannot_be_read_is_named(root: Path, local: Path) -> None:
    (root / "sm90").chmod(0)
    try:
        with pytest.raises(KeyFactorError, match="sm90 cannot be read"):
            tree_fingerprint(root, local)
    finally:
        (root / "sm90").chmod(0o755)


def test_names_that_are_no_text_are_kept_apart(root: Path, local: Path) -> None:
    seen = set()
    for name in (b"\xff.h", b"\xfe.h", b"new\nline.h", "é.h".encode()):
        path = os.path.join(os.fsencode(root), name)  # noqa: PTH118 - bytes
        with open(path, "wb"):  # noqa: PTH123
            seen.add(tree_fingerprint(root, local))
        os.unlink(path)  # noqa: PTH108
    assert len(seen) == 4
