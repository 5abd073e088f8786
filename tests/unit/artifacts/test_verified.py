"""The list of verified artifacts: read and hashed once, and again after anything that could have changed them."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kcoord.artifacts import local, verified
from kcoord.artifacts.local import Artifact
from kcoord.artifacts.manifest import MANIFEST_NAME, Origin
from kcoord.artifacts.verified import Verified
from kcoord.errors import ArtifactInvalid
from kcoord.keys import CacheKey
from kcoord.keys.tools import machine_cache
from kcoord.retention.limits import Limits
from kcoord.retention.local_collector import collect_local

KEY = CacheKey.of("test", "kernel", source="x")
FILES = {
    "kernel.cubin": b"\x7fELF" + bytes(range(256)),
    "kernel.json": b'{"name": "k"}',
    "sub/lib.so": Path("/bin/true").read_bytes(),
}
LIST = f"toolchain/{verified._NAME}"


class Tier:
    """A local directory with one artifact, and the names of the files that are read in it."""

    def __init__(self, local_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.local_dir, self.home = local_dir, local_dir / "objects" / "artifact"
        self.read: list[str] = []
        local_dir.mkdir(mode=0o700)
        staging = local.new_staging(self.home)
        for name, content in FILES.items():
            (staging / name).parent.mkdir(exist_ok=True)
            (staging / name).write_bytes(content)
        local.publish_local(staging, self.home, KEY, 2.0, Origin("host", 1, 0, "cuda:90#0", 1.7e9))
        read = local.read_plain

        def noted(path: str, most: int, **how: Any) -> bytes:
            self.read.append(path.removeprefix(f"{self.home}/"))
            return read(path, most, **how)

        monkeypatch.setattr(local, "read_plain", noted)

    def opened(self, *, strict: bool = False) -> Artifact | None:
        """The artifact as a new process finds it, which ends afterwards; `read` is of this look."""
        self.read.clear()
        process = Verified(self.local_dir, strict=strict)
        try:
            return process.open(self.home, KEY)
        finally:
            process.close()

    @property
    def was_read(self) -> bool:
        return bool(self.read)


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tier:
    """Its artifact is listed. Files of a moment ago are settled here, as they are for a later job."""
    made = Tier(tmp_path / "local", monkeypatch)
    monkeypatch.setattr(machine_cache, "_RACY", 0)
    _wait_for_another_tick(made.home)
    assert made.opened() is not None
    assert made.read == [MANIFEST_NAME, *sorted(FILES)]
    return made


def _wait_for_another_tick(home: Path) -> None:
    """Until a new file of this file system has a later ctime than the artifact's."""
    newest, probe = max(path.stat().st_ctime_ns for path in home.rglob("*")), home.parent / "probe"
    while not (probe.write_bytes(b"") or probe.stat().st_ctime_ns > newest):
        pass


def test_another_process_reads_nothing_of_a_verified_artifact(tier: Tier) -> None:
    """The list has the needs of its libraries, too."""
    assert tier.opened() == local.open_artifact(tier.home, KEY.digest)
    tier.read.clear()
    found = tier.opened()
    assert found is not None
    assert not tier.was_read
    assert found.key.digest == KEY.digest
    assert found.manifest.needs


def test_where_signatures_are_required_every_byte_is_read(tier: Tier) -> None:
    assert tier.opened(strict=True) is not None
    assert tier.read == [MANIFEST_NAME, *sorted(FILES)]


def test_another_keys_artifact_is_refused(tier: Tier) -> None:
    with pytest.raises(ArtifactInvalid, match="another key"):
        Verified(tier.local_dir, strict=False).open(tier.home, CacheKey.of("test", "kernel", source="y"))


def _flipped(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


def _in_place(path: Path) -> None:
    """Same inode, size and mtime."""
    before = path.stat()
    path.write_bytes(_flipped(path.read_bytes()))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def _by_another(path: Path) -> None:
    """Another file of the same size and mtime, put in its place by a rename."""
    before, other = path.stat(), path.with_name("other")
    other.write_bytes(_flipped(path.read_bytes()))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


def _by_a_link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to("other")


def _truncated(path: Path) -> None:
    os.truncate(path, 2)


@pytest.mark.parametrize("name", [MANIFEST_NAME, *FILES])
@pytest.mark.parametrize("change", [_in_place, _by_another, _by_a_link, _truncated, Path.unlink])
def test_a_file_that_was_changed_is_read_and_refused(tier: Tier, name: str, change: Callable[[Path], None]) -> None:
    change(tier.home / name)
    if change is Path.unlink and name == MANIFEST_NAME:
        assert tier.opened() is None
    else:
        with pytest.raises(ArtifactInvalid):
            tier.opened()
    assert tier.was_read or change is Path.unlink


def test_a_copy_of_the_artifact_is_verified_itself(tier: Tier) -> None:
    tier.home.rename(tier.home.with_name("first"))
    shutil.copytree(tier.home.with_name("first"), tier.home)  # of the same names, sizes and mtimes
    assert tier.opened() is not None
    assert tier.was_read


def test_an_artifact_that_could_change_within_the_clocks_tick_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Tier(tmp_path / "local", monkeypatch)
    assert tier.opened() is not None
    assert tier.opened() is not None
    assert tier.was_read
    assert not (tier.local_dir / LIST).exists()


def _edited(tier: Tier, edit: Callable[[list[Any]], None]) -> None:
    entry = machine_cache.kept(tier.local_dir, verified._NAME)
    edit(entry)
    machine_cache.keep(tier.local_dir, verified._NAME, entry)


def _other_boot(tier: Tier) -> None:
    _edited(tier, lambda entry: entry.__setitem__(0, "another boot"))


def _a_day_later(tier: Tier) -> None:
    _edited(tier, lambda entry: entry[1][0][1].__setitem__(0, int(time.time()) - verified._LASTS - 1))


def _of_the_future(tier: Tier) -> None:
    _edited(tier, lambda entry: entry[1][0][1].__setitem__(0, int(time.time()) + 3600))


def _torn(tier: Tier) -> None:
    os.truncate(tier.local_dir / LIST, (tier.local_dir / LIST).stat().st_size // 2)


def _altered(tier: Tier) -> None:
    content = (tier.local_dir / LIST).read_bytes()
    (tier.local_dir / LIST).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def _others_may_write(tier: Tier) -> None:
    (tier.local_dir / LIST).chmod(0o666)


def _foreign(tier: Tier) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(tier.local_dir / LIST, 12345, 12345)


def _gone(tier: Tier) -> None:
    (tier.local_dir / LIST).unlink()


def _a_pipe(tier: Tier) -> None:
    (tier.local_dir / LIST).unlink()
    os.mkfifo(tier.local_dir / LIST)


@pytest.mark.parametrize(
    "fault", [_other_boot, _a_day_later, _of_the_future, _torn, _altered, _others_may_write, _foreign, _gone, _a_pipe]
)
def test_a_list_that_does_not_count_costs_the_verification_and_is_renewed(
    tier: Tier, fault: Callable[[Tier], None]
) -> None:
    fault(tier)
    assert tier.opened() is not None
    assert tier.read == [MANIFEST_NAME, *sorted(FILES)]
    assert tier.opened() is not None
    assert not tier.was_read


def test_the_list_of_one_process_is_added_to_that_of_another(tier: Tier) -> None:
    other, home = CacheKey.of("test", "kernel", source="other"), tier.local_dir / "second"
    processes = [Verified(tier.local_dir, strict=False) for _ in range(2)]
    staging = local.new_staging(home)
    (staging / "file").write_bytes(b"x")
    local.publish_local(staging, home, other, 1.0, Origin())
    _wait_for_another_tick(home)
    (tier.local_dir / LIST).unlink()
    assert processes[0].open(tier.home, KEY) is not None
    assert processes[1].open(home, other) is not None
    for process in processes:
        process.close()
    _, listed = machine_cache.kept(tier.local_dir, verified._NAME)
    assert sorted(os.fsdecode(each) for each, _ in listed) == sorted(map(str, (tier.home, home)))


def _last_read(tier: Tier, hours: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """List the artifact as read so long ago: `relatime` leaves an access time alone for a day."""
    at = time.time() - hours * 3600
    for path in tier.home.rglob("*"):
        os.utime(path, (at, at - 3600))
    _wait_for_another_tick(tier.home)
    open_ = os.open
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda path, flags, *rest, **how: open_(path, flags | os.O_NOATIME, *rest, **how))
        assert tier.opened() is not None


def test_what_a_rank_is_about_to_load_is_not_collected(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    _last_read(tier, 30, monkeypatch)
    assert tier.opened() is not None
    assert collect_local(tier.local_dir, Limits(unused_for=26 * 3600.0)).removed == []
    assert (tier.home / MANIFEST_NAME).exists()


@pytest.mark.parametrize("packed", [b"", b"\xc1", b"\x05", b"\x91\x01"])
def test_an_entry_of_another_shape_costs_the_verification(tier: Tier, packed: bytes) -> None:
    entry = [verified._boot(), [[os.fsencode(tier.home), [int(time.time()), packed]]]]
    machine_cache.keep(tier.local_dir, verified._NAME, entry)
    assert tier.opened() is not None
    assert tier.was_read


def test_the_scripts_exception_passes_the_list(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    def handler(number: int, frame: Any) -> None:
        raise TimeoutError("the step took too long")

    def lstat(path: Any, *rest: Any, **how: Any) -> os.stat_result:
        signal.raise_signal(signal.SIGALRM)
        return found(path, *rest, **how)

    before, found = signal.signal(signal.SIGALRM, handler), os.lstat
    process = Verified(tier.local_dir, strict=False)
    process._entries = process._read()
    monkeypatch.setattr(verified.os, "lstat", lstat)
    try:
        with pytest.raises(TimeoutError, match="step"):
            process.open(tier.home, KEY)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_home_that_another_node_removed_is_missed_though_its_attributes_are_cached(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of NFS answers `lstat` from its cache for up to a minute, and asks the server when a file is opened."""
    cached = {path: path.lstat() for path in tier.home.rglob("*")}
    shutil.rmtree(tier.home)
    found = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path, **how: cached.get(Path(path)) or found(path, **how))
    assert tier.opened() is None
