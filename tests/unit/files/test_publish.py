"""Publishing: one rename, one winner, and every fault of a file system with its remedy."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kcoord.artifacts import local
from kcoord.artifacts.manifest import Origin
from kcoord.errors import StoreError
from kcoord.files.faults import store_error
from kcoord.files.rename import set_aside
from kcoord.keys import CacheKey
from tests.support.mounts import tmpfs

_ROOT = Path(__file__).parents[3]
KEY = CacheKey.of("test", "kernel", source="x")
ORIGIN = Origin("host", 1, 0, "cuda:90#0", 1.7e9)


def stage(home: Path, content: bytes = b"content", **files: bytes) -> Path:
    staging = local.new_staging(home)
    for name, text in {"kernel.cubin": content, **files}.items():
        (staging / name).write_bytes(text)
    return staging


def publish(home: Path, content: bytes = b"content") -> local.Artifact:
    return local.publish_local(stage(home, content), home, KEY, 1.0, ORIGIN)


def staged(home: Path) -> list[Path]:
    return list((home.parent / ".kcoord" / "staging").iterdir())


def quarantined(home: Path) -> list[Path]:
    directory = home.parent / ".kcoord" / "quarantine"
    return list(directory.iterdir()) if directory.exists() else []


# --- who wins ---


def test_the_second_publisher_gets_what_the_first_published(tmp_path: Path) -> None:
    home = tmp_path / "home"
    publish(home, b"first")
    artifact = publish(home, b"second")
    assert (home / "kernel.cubin").read_bytes() == b"first"
    assert local.read_contents(artifact) == {"kernel.cubin": b"first"}
    assert staged(home) == []
    assert quarantined(home) == []


_RACER = """
import os, sys
from pathlib import Path
from kcoord.artifacts import local
from tests.unit.files.test_publish import KEY, stage
from kcoord.artifacts.manifest import Origin
root, me, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for n in range(rounds):
    home = root / f"home{n}"
    mine = b"%d" % me * 5000
    staging = stage(home, mine, second=mine)
    print("staged", flush=True)
    sys.stdin.readline()
    artifact = local.publish_local(staging, home, KEY, 1.0, Origin("host", os.getpid(), me, "", float(n)))
    contents = set(local.read_contents(artifact).values())
    assert len(contents) == 1, "files of two writers"
    print(artifact.manifest.origin.rank, contents.pop()[:1].decode(), flush=True)
"""


def test_of_two_processes_that_publish_one_key_at_once_one_wins_and_both_have_its_whole_artifact(
    tmp_path: Path,
) -> None:
    rounds = 50
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, str(tmp_path), str(me), str(rounds)],
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for me in (1, 2)
    ]
    winners = []
    try:
        for _ in range(rounds):
            for racer in racers:
                assert racer.stdout is not None
                assert racer.stdout.readline() == "staged\n"
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write("go\n")
                racer.stdin.flush()
            told = [racer.stdout.readline().split() for racer in racers if racer.stdout is not None]
            assert told[0] == told[1], "each has the winner's"
            assert told[0][0] == told[0][1], "the manifest is that of the files"
            winners.append(told[0][0])
        assert [racer.wait(30) for racer in racers] == [0, 0]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    assert len(winners) == rounds
    assert staged(tmp_path / "home0") == []
    assert quarantined(tmp_path / "home0") == []


def test_an_empty_directory_at_the_final_name_is_replaced(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    assert local.read_contents(publish(home)) == {"kernel.cubin": b"content"}
    assert quarantined(home) == []


def _torn(home: Path) -> None:
    home.mkdir()
    (home / "kernel.cubin").write_bytes(b"half")


def _damaged(home: Path) -> None:
    publish(home, b"old")
    (home / "kernel.cubin").write_bytes(b"new")


def _of_another_key(home: Path) -> None:
    local.publish_local(stage(home), home, CacheKey.of("test", "kernel", source="y"), 1.0, ORIGIN)


@pytest.mark.parametrize("what", [_torn, _damaged, _of_another_key])
def test_an_invalid_directory_at_the_final_name_is_quarantined_and_replaced(
    tmp_path: Path, what: Callable[[Path], None]
) -> None:
    home = tmp_path / "home"
    what(home)
    assert local.read_contents(publish(home)) == {"kernel.cubin": b"content"}
    (kept,) = quarantined(home)
    assert (kept / "kernel.cubin").exists()
    assert staged(home) == []


def test_a_name_at_which_invalid_artifacts_reappear_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else's writer, in the moment between quarantine and the next rename: it stands in `set_aside` here."""
    home = tmp_path / "home"
    staging = stage(home)
    _torn(home)

    def aside_and_back(final: Path, quarantine: Path, root: Path | None = None) -> None:
        set_aside(final, quarantine, root)
        _torn(final)

    monkeypatch.setattr("kcoord.files.rename.set_aside", aside_and_back)
    with pytest.raises(StoreError, match="check who writes"):
        local.publish_local(staging, home, KEY, 1.0, ORIGIN)
    assert (staging / "kernel.cubin").read_bytes() == b"content", "the compiled files are still there"
    assert len(quarantined(home)) == 3


def test_publishing_touches_the_parent_so_that_nfs_clients_look_again(tmp_path: Path) -> None:
    home = tmp_path / "sub" / "home"
    staging = stage(home)
    os.utime(home.parent, (0, 0))
    local.publish_local(staging, home, KEY, 1.0, ORIGIN)
    assert home.parent.stat().st_mtime > 0


# --- faults of the file system, for real ---


def one_line(error: StoreError, where: Path) -> str:
    line = str(error)
    assert "\n" not in line
    assert str(where) in line
    return line


def test_exdev_is_told_with_its_remedy_and_the_files_stay(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "elsewhere", "1m") as elsewhere:
        staging = stage(elsewhere / "artifact")
        home = tmp_path / "home"
        with pytest.raises(StoreError, match="another file system than its staging directory") as caught:
            local.publish_local(staging, home, KEY, 1.0, ORIGIN)
        one_line(caught.value, home)
        assert not home.exists()
        assert (staging / "kernel.cubin").read_bytes() == b"content"


def test_enospc_is_told_with_its_remedy_and_nothing_is_published(tmp_path: Path) -> None:
    source = publish(tmp_path / "source", os.urandom(600 << 10))
    with tmpfs(tmp_path / "full", "512k") as full:
        with pytest.raises(StoreError, match="its file system is full: free space") as caught:
            local.install(source.manifest, local.read_contents(source), full / "home")
        one_line(caught.value, full)
        assert not (full / "home").exists()
        assert staged(full / "home") == []


def test_a_disk_that_fills_up_while_files_are_settled_leaves_them_whole(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "full", "512k") as full:
        home = full / ("long" * 40)
        group = b'{"child_paths": {' + b'"k": "@KCOORD_HOME@/k", ' * 4000 + b'"z": ""}}'
        staging = stage(home, **{"group.json": group})
        with (full / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while ballast.write(b"\0" * 4096):
                pass
        os.truncate(full / "ballast", (full / "ballast").stat().st_size - (8 << 10))  # room for a manifest only
        with pytest.raises(StoreError, match="full"):
            local.publish_local(staging, home, KEY, 1.0, ORIGIN)
        assert (staging / "group.json").read_bytes() == group
        assert not home.exists()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EDQUOT, "quota"), (errno.ESTALE, "mount it again"), (errno.EIO, "log"), (errno.ENOTDIR, "name a directory"),
        (errno.EPERM, "let this user"), (errno.ENAMETOOLONG, "shorter"), (errno.ENOENT, "create it"), (errno.EBUSY, "busy"),
    ],
)  # fmt: skip
def test_every_fault_is_one_line_with_the_path(number: int, remedy: str) -> None:
    line = one_line(store_error(OSError(number, os.strerror(number)), Path("/s")), Path("/s"))
    assert remedy in line.lower()
    assert str(store_error(OSError("odd"), Path("/s"))) == "/s: odd"
