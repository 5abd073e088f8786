"""Publishing a file in a shared directory: one link, one winner, and each way in which a file system may refuse."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kcoord.errors import StoreError
from kcoord.files import beneath
from kcoord.files.link import publish_file

Link = Callable[[Path, Path, Path | None], None]


class Site:
    """A shared directory, and a file in it that many publish."""

    def __init__(self, root: Path) -> None:
        self.root, self.staging, self.final = root, root / "staging", root / "objects" / "ab" / "name"
        self.staging.mkdir(parents=True)
        self.final.parent.parent.mkdir()
        self.written: list[Path] = []

    def publish(self, content: bytes = b"ours", holds: Callable[[], bool] | None = None) -> bool:
        def write(file: object) -> None:
            self.written.append(Path(file.name))  # type: ignore[attr-defined]
            file.write(content)  # type: ignore[attr-defined]

        return publish_file(
            self.final,
            self.root,
            self.staging,
            write,
            holds or self.is_theirs,
        )

    def is_theirs(self) -> bool:
        """A judge: what does not verify is moved aside."""
        if not os.path.lexists(self.final):
            return False
        if self.final.is_file() and self.final.read_bytes() in (b"theirs", b"ours"):
            return True
        self.final.rename(self.root / f"aside{len(self.written)}")
        return False

    def is_clean(self) -> bool:
        return not list(self.staging.iterdir())


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "store")


def refusing(
    monkeypatch: pytest.MonkeyPatch, number: int, times: int = 1, before: Link = lambda source, target, root: None
) -> None:
    """`link` does what ``before`` does, and then says that it failed. No local file system fails so on demand."""
    link, left = beneath.link, [times]

    def failing(source: Path, target: Path, root: Path | None = None) -> None:
        left[0] -= 1
        if left[0] < 0:
            link(source, target, root)
            return
        before(source, target, root)
        raise OSError(number, os.strerror(number), str(source))

    monkeypatch.setattr(beneath, "link", failing)


def test_a_file_is_published_with_the_mode_of_the_umask_and_one_name(site: Site) -> None:
    before = os.umask(0o022)
    try:
        assert site.publish()
    finally:
        os.umask(before)
    found = site.final.stat()
    assert (site.final.read_bytes(), found.st_mode & 0o777, found.st_nlink) == (b"ours", 0o644, 1)
    assert site.is_clean()


def test_of_many_writers_one_wins_and_the_others_learn_it(site: Site) -> None:
    ready = threading.Barrier(8)

    def publish(number: int) -> bool:
        ready.wait(20)
        return site.publish(b"ours", lambda: site.final.read_bytes() == b"ours")

    for _ in range(20):
        with ThreadPoolExecutor(8) as pool:
            assert sorted(pool.map(publish, range(8))) == [False] * 7 + [True]
        site.final.unlink()
    assert site.is_clean()


@pytest.mark.parametrize("there", ["torn", "directory", "link", "pipe"])
def test_what_does_not_verify_makes_room(site: Site, tmp_path: Path, there: str) -> None:
    site.final.parent.mkdir()
    (tmp_path / "victim").write_bytes(b"victim")
    {
        "torn": lambda: site.final.write_bytes(b"torn"),
        "directory": site.final.mkdir,
        "link": lambda: site.final.symlink_to(tmp_path / "victim"),
        "pipe": lambda: os.mkfifo(site.final),
    }[there]()
    assert site.publish()
    assert site.final.read_bytes() == b"ours"
    assert (tmp_path / "victim").read_bytes() == b"victim"


def test_a_name_that_is_torn_again_and_again_is_given_up(site: Site) -> None:
    def torn() -> bool:
        site.final.write_bytes(b"torn")
        return False

    site.final.parent.mkdir()
    torn()
    with pytest.raises(StoreError, match="check who writes"):
        site.publish(holds=torn)
    assert len(set(site.written)) == 3
    assert site.is_clean()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_a_staged_file_that_was_swept_is_written_again_under_another_name(
    site: Site, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refusing(monkeypatch, number, before=lambda source, target, root: source.unlink())
    assert site.publish()
    assert len(set(site.written)) == 2
    assert site.final.read_bytes() == b"ours"


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE, errno.EEXIST, errno.EIO])
def test_a_link_that_was_done_and_is_reported_as_failed_counts_as_done(
    site: Site, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """An NFS client may send a request twice."""
    refusing(monkeypatch, number, before=beneath.link)
    assert not site.publish(), "as if another had been faster: its digest is ours"
    assert site.final.read_bytes() == b"ours"
    assert len(site.written) == 1
    assert site.is_clean()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_a_staged_file_that_is_swept_each_time_is_a_fault_of_the_store(
    site: Site, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refusing(monkeypatch, number, times=9)
    with pytest.raises(StoreError, match="mount it"):
        site.publish()
    assert site.is_clean()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-write"),
        (errno.EACCES, "let this user"),
    ],
)
def test_a_file_system_that_takes_nothing_is_told_with_its_remedy(
    site: Site, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    refusing(monkeypatch, number)
    with pytest.raises(StoreError, match=remedy):
        site.publish()
    assert not site.final.exists()
    assert site.is_clean()


_NO_LINKS = [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EIO, errno.EMLINK]


@pytest.mark.parametrize("number", _NO_LINKS)
def test_without_links_a_file_is_renamed_into_place(site: Site, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    refusing(monkeypatch, number, times=9)
    assert site.publish()
    assert site.final.read_bytes() == b"ours"
    assert len(site.written) == 1
    assert site.is_clean()


@pytest.mark.parametrize("number", _NO_LINKS)
def test_without_links_nothing_replaces_what_holds(site: Site, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    site.publish(b"theirs")
    refusing(monkeypatch, number, times=9)
    assert not site.publish()
    assert site.final.read_bytes() == b"theirs"


def test_without_links_the_error_of_the_rename_counts(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path, root: Path | None = None) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    refusing(monkeypatch, errno.EPERM)
    monkeypatch.setattr(beneath, "rename", full)
    with pytest.raises(StoreError, match="free space"):
        site.publish()
    assert site.is_clean()


def test_a_file_that_took_the_place_of_the_staged_one_is_judged_as_anothers(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = beneath.link

    def exchanged(source: Path, target: Path, root: Path | None = None) -> None:
        (other := source.with_name("other")).write_bytes(b"torn")
        other.replace(source)
        link(source, target, root)
        monkeypatch.setattr(beneath, "link", link)

    monkeypatch.setattr(beneath, "link", exchanged)
    assert site.publish()
    assert site.final.read_bytes() == b"ours"


def test_no_directory_is_made_but_the_names_own(site: Site) -> None:
    site.final.parent.parent.rmdir()
    with pytest.raises(StoreError, match="it is missing"):
        site.publish()
    assert not site.final.parent.parent.exists()
    assert site.is_clean()
