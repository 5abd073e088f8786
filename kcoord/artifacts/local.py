"""The local tier: artifacts on the node's own disk, each a directory in its compiler's own layout.

A *home* is an artifact's directory, ``<root>/<name>``. Beside the homes lie ``<root>/.kcoord/staging`` and
``<root>/.kcoord/quarantine``, on the same file system: publishing is one rename. A publish reads the staged files once, to hash
them; whoever loads an artifact, or sends it on, verifies the bytes that it reads itself.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from kcoord.artifacts.describe import describe
from kcoord.artifacts.manifest import (
    HOME_PLACEHOLDER,
    LARGEST_IN_MEMORY,
    LARGEST_MANIFEST,
    MANIFEST_NAME,
    Contents,
    FileEntry,
    Manifest,
    Origin,
    check_content,
    checked_pieces,
    home_token,
    largest_at_home,
    portable,
)
from kcoord.errors import ArtifactInvalid, ArtifactUnreadable, StoreError
from kcoord.files.atomic import replace_file, staging_name
from kcoord.files.faults import store_errors
from kcoord.files.private import check_directory, check_folders, check_ours, check_tier, make_own
from kcoord.files.reading import open_plain, read_plain
from kcoord.files.rename import rename_into_place, set_aside, write_files
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.tools.machine_cache import is_settled, stamp_of
from kcoord.ownership import is_ours, make_directory

Identity = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Artifact:
    """An artifact in the local tier: immutable files below `path`, verified when it was opened.

    `identities`: `identity_of` the manifest and of each file, as they were verified; none if one could change and keep its own.
    """

    path: Path
    manifest: Manifest
    identities: tuple[Identity, ...] = field(default=(), compare=False, repr=False)

    @property
    def key(self) -> CacheKey:
        return self.manifest.key


def identity_of(found: os.stat_result) -> Identity:
    """Numbers that change with a file's content, on this boot."""
    return found.st_dev, *stamp_of(found)


def place_of(digest: str) -> str:
    """The place below the local directory of an artifact whose compiler has no layout of its own."""
    return f"objects/{digest[:2]}/{digest}"


def open_artifact(home: Path, digest: str | None = None) -> Artifact | None:
    """The artifact at `home`, every byte checked; None if there is none. One that does not verify is read once more, afresh.

    Raises `ArtifactInvalid` if the files there are torn, altered, or (with `digest`) another key's; `ArtifactUnreadable` if this
    process cannot tell.
    """
    found = _read_twice(home, digest, keep=False)
    return None if found is None else found[0]


def published(home: Path, digest: str) -> Artifact | None:
    """The artifact at `home`, which another process of this user has just verified: its files must be there, and are not read.

    None if there is none, or a file is missing. Raises `ArtifactInvalid` as `open_artifact` does.
    """
    root = os.fspath(home)
    path = f"{root}/{MANIFEST_NAME}"
    try:
        check_directory(root)
        manifest = Manifest.decode(read_plain(path, LARGEST_MANIFEST, opened=lambda found: check_ours(path, found)))
        for entry in manifest.files:
            check_folders(root, entry.name)
            check_ours(f"{root}/{entry.name}", os.lstat(f"{root}/{entry.name}"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(home, error) from error
    if manifest.key.digest != digest:
        raise ArtifactInvalid(f"{home} holds the artifact of another key")
    return Artifact(home, manifest)


def _read_twice(home: Path, digest: str | None, *, keep: bool) -> tuple[Artifact, dict[str, bytes]] | None:
    try:
        return _read(home, digest, keep, afresh=False)
    except ArtifactInvalid:
        return _read(home, digest, keep, afresh=True)


def _read(home: Path, digest: str | None, keep: bool, *, afresh: bool) -> tuple[Artifact, dict[str, bytes]] | None:
    root, now = os.fspath(home), time.time_ns()
    contents: dict[str, bytes] = {}
    seen: list[os.stat_result] = []
    try:
        encoded = read_plain(f"{root}/{MANIFEST_NAME}", LARGEST_MANIFEST, afresh=afresh, opened=seen.append)
    except (FileNotFoundError, NotADirectoryError):
        return None  # even if an artifact appears now: one rename publishes it, whole from its first moment
    except OSError as error:
        raise _unreadable(home, error) from error
    try:
        check_directory(root)
        check_ours(f"{root}/{MANIFEST_NAME}", seen[0])
        manifest = Manifest.decode(encoded)
        if digest is not None and manifest.key.digest != digest:
            raise ArtifactInvalid(f"{home} holds the artifact of another key")
        for entry in manifest.files:
            if keep or entry.relocatable or entry.size <= LARGEST_IN_MEMORY:
                content = _read_file(home, entry, afresh, seen.append)
                if keep:
                    contents[entry.name] = content
                continue
            with _open_file(home, entry, afresh) as file:
                seen.append(os.fstat(file.fileno()))
                for _ in checked_pieces(entry, file):
                    pass
    except (FileNotFoundError, NotADirectoryError) as error:
        if (home / MANIFEST_NAME).exists():
            raise ArtifactInvalid(f"{home} lacks {error.filename}") from error
        return None
    except OSError as error:
        raise _unreadable(home, error) from error
    settled = all(is_settled(stamp_of(found), now) for found in seen)
    return Artifact(home, manifest, tuple(map(identity_of, seen)) if settled else ()), contents


def _read_file(
    home: Path,
    entry: FileEntry,
    afresh: bool = False,
    opened: Callable[[os.stat_result], object] = lambda found: None,
) -> bytes:
    """The portable content of one file of the artifact at `home`, checked. Raises `ArtifactInvalid`, and OSError."""
    path = f"{os.fspath(home)}/{entry.name}"
    check_folders(os.fspath(home), entry.name)

    def check(found: os.stat_result) -> None:
        check_ours(path, found)
        opened(found)

    content = read_plain(path, largest_at_home(entry, home), afresh=afresh, opened=check)
    content = portable(entry, content, home)
    check_content(entry, content)
    return content


def _open_file(home: Path, entry: FileEntry, afresh: bool = False) -> BinaryIO:
    """One file of the artifact at `home`, to be read piece by piece as it travels; its bytes are not checked."""
    if entry.relocatable:
        return io.BytesIO(_read_file(home, entry, afresh))
    path = f"{os.fspath(home)}/{entry.name}"
    check_folders(os.fspath(home), entry.name)
    file = open_plain(path, entry.size, afresh=afresh)
    try:
        check_ours(path, os.fstat(file.fileno()))
    except ArtifactInvalid:
        file.close()
        raise
    return file


def contents_at(home: Path, digest: str) -> tuple[Manifest, Contents] | None:
    """The artifact's manifest, and its contents as they travel, checked; None if there is none.

    Of more than `LARGEST_IN_MEMORY` bytes each file is opened when it is sent on, and checked by its reader. Raises as
    `open_artifact` does.
    """
    manifest_path = f"{os.fspath(home)}/{MANIFEST_NAME}"
    try:
        check_directory(os.fspath(home))
        check_ours(manifest_path, os.lstat(manifest_path))
        manifest = Manifest.read(home)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(home, error) from error
    if manifest.size <= LARGEST_IN_MEMORY or manifest.key.digest != digest:
        found = _read_twice(home, digest, keep=True)
        return None if found is None else (found[0].manifest, found[1])

    def opened(entry: FileEntry) -> BinaryIO:
        try:
            return _open_file(home, entry)
        except OSError as error:
            raise _unreadable(home, error) from error

    return manifest, opened


def _unreadable(home: Path, error: OSError) -> ArtifactInvalid:
    """`ArtifactInvalid` for a failure of the disk, which others meet too; else `ArtifactUnreadable` (too many open files)."""
    of_the_disk = error.errno in (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EISDIR)
    return (ArtifactInvalid if of_the_disk else ArtifactUnreadable)(f"{home} cannot be read: {error}")


def check_owner(place: Path) -> None:
    """Raises `ArtifactInvalid` if another user owns `place`, a home or a staging directory, or may write around it.

    What others can write is neither published nor signed.
    """
    try:
        check_tier(place.parent)
    except StoreError as error:
        raise ArtifactInvalid(f"{error}; artifacts are not shared there") from error
    with suppress(OSError):  # there is none, or its reader reports why it cannot be read
        if not is_ours(uid := place.lstat().st_uid):
            raise ArtifactInvalid(f"{place} belongs to user {uid}: it is not used")


def is_whole(home: Path, digest: str) -> bool:
    """True if `home` holds the whole artifact of `digest`."""
    try:
        return open_artifact(home, digest) is not None
    except ArtifactInvalid:
        return False


def new_staging(home: Path, room: int = 0, local_dir: Path | None = None) -> Path:
    """Make a private directory that can be renamed to `home`.

    `local_dir` is `Settings.local_dir`: in another directory, which the user named, artifacts may be read by those whom the umask
    lets. Raises `StoreError`, also if fewer than `room` bytes are free, or others may write to the directories on the way.
    """
    staging = home.parent / ".kcoord" / "staging" / staging_name()
    named = local_dir is not None and not home.is_relative_to(local_dir)
    with store_errors(staging.parent):
        if named:
            make_directory(home.parent, 0o755)  # its parents, too, whatever the umask
        make_own(staging.parent)
        staging.mkdir(
            mode=0o755 if named else 0o700
        )  # survives the rename; the directory above keeps others out until then
        if room and not has_room(staging, room):
            staging.rmdir()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return staging


def takes_files(staging: Path, room: int) -> bool:
    """True if `staging` exists, and its disk takes a file and has `room` bytes free. One is written: no call shows a quota."""
    probe = staging.with_name(f"{staging.name}.probe")
    try:
        if not staging.is_dir() or not has_room(staging, room):
            return False
        try:
            probe.write_bytes(os.urandom(64 << 10))
        finally:
            probe.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def has_room(directory: Path, room: int) -> bool:
    """True if the disk of `directory` has `room` bytes free. Raises OSError."""
    disk = os.statvfs(directory)
    return disk.f_blocks == 0 or disk.f_bavail * disk.f_frsize >= room  # some file systems report no size


def quarantine_of(home: Path) -> Path:
    return home.parent / ".kcoord" / "quarantine"


def quarantine(home: Path) -> None:
    """Move an invalid artifact aside. Raises `StoreError`."""
    with store_errors(home):
        set_aside(home, quarantine_of(home))


def publish_local(
    staging: Path,
    home: Path,
    key: CacheKey,
    compile_seconds: float,
    origin: Origin,
    keep: Callable[[Manifest, dict[str, bytes] | None], object] = lambda manifest, contents: None,
) -> Artifact:
    """Write the manifest of the files in `staging`, rename it to `home`, and return the artifact there, whoever won.

    The files are read once, for their hashes; ``keep(manifest, contents)`` gets them if ours won, or None if they are large.
    The winner is not read again, and another's artifact is verified. Raises `ArtifactInvalid` (nothing was staged), or
    `StoreError` (the directory cannot be written). The staged files are then as they were, to be published again, or adopted.
    """
    with store_errors(staging):
        staged = describe(staging, key, compile_seconds, origin, home)
        (staging / MANIFEST_NAME).write_bytes(staged.encoded)
        try:
            _write_texts(staging, _relocated(staged.relocatable, home))
            _close_to_writers(staging, staged.manifest)
            other = _rename(staging, home, key.digest, staged.manifest.targets)
        except (StoreError, OSError):
            with suppress(OSError):
                _write_texts(staging, staged.relocatable)
            raise
    if other is None:
        keep(staged.manifest, staged.contents)
    return other or Artifact(home, staged.manifest)


def adopt(staging: Path, key: CacheKey, compile_seconds: float, origin: Origin) -> Artifact:
    """Use staged files where they are: for this process alone, on a disk that may be full. No manifest is written.

    Raises `ArtifactInvalid` if there are no files, or they cannot be read.
    """
    try:
        staged = describe(staging, key, compile_seconds, origin, staging)
    except OSError as error:
        raise ArtifactInvalid(f"{staging} cannot be read: {error}") from error
    with suppress(OSError):  # only other processes need the relocatable files, and none load this artifact
        _write_texts(staging, _relocated(staged.relocatable, staging))
    return Artifact(staging, staged.manifest)


def install(manifest: Manifest, contents: Contents, home: Path, local_dir: Path | None = None) -> Artifact:
    """Write an artifact from elsewhere to `home`, verify that copy, and return the artifact that is there then.

    `contents` are portable and already checked against `manifest`, or are checked now. `local_dir`: see `new_staging`. Raises
    `StoreError`, and, of contents that are opened here, `ArtifactInvalid`.
    """
    staging = new_staging(home, local_dir=local_dir)
    try:
        with store_errors(home):
            written = _write_pieces(staging, manifest, contents) if callable(contents) else contents
            texts = {entry.name: written[entry.name] for entry in manifest.files if entry.relocatable}
            write_files(staging, written | _relocated(texts, home))
            (staging / MANIFEST_NAME).write_bytes(manifest.encode())
            _close_to_writers(staging, manifest)
            artifact = _rename(staging, home, manifest.key.digest)
    except (StoreError, ArtifactInvalid):
        shutil.rmtree(staging, ignore_errors=True)
        raise
    try:
        artifact = artifact or open_artifact(home, manifest.key.digest)
    except ArtifactInvalid as error:
        raise StoreError(f"{home}: what was just written does not verify ({error}): check the disk") from error
    if artifact is None:
        raise StoreError(f"{home}: it vanished right after it was written: does something clean this directory?")
    return artifact


def _close_to_writers(staging: Path, manifest: Manifest) -> None:
    """Take the right to write to the artifact's files and folders from everybody else, whatever the umask. Raises OSError."""
    names = {MANIFEST_NAME, *(file.name for file in manifest.files)}
    folders = {str(folder) for name in names for folder in PurePosixPath(name).parents}
    for path in (f"{staging}/{name}" for name in names | folders):
        mode = os.lstat(path).st_mode
        if mode & 0o022:
            os.chmod(path, stat.S_IMODE(mode) & ~0o022)  # noqa: PTH101 - plain paths: a publish has many


def _write_pieces(staging: Path, manifest: Manifest, opened: Callable[[FileEntry], BinaryIO]) -> dict[str, bytes]:
    """Write the files that ``opened(entry)`` opens, checked; returns the texts of those that are relocatable."""
    texts: dict[str, bytes] = {}
    for entry in manifest.files:
        with opened(entry) as file:
            pieces = checked_pieces(entry, file)
            if entry.relocatable:
                texts[entry.name] = b"".join(pieces)
                continue
            path = staging / entry.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as copy:
                copy.writelines(pieces)
    return texts


def _relocated(texts: dict[str, bytes], home: Path) -> dict[str, bytes]:
    """The portable `texts` with the name of `home` in the place of `HOME_PLACEHOLDER`."""
    token = home_token(home)
    return {name: text.replace(HOME_PLACEHOLDER, token) for name, text in texts.items()}


def _write_texts(staging: Path, texts: dict[str, bytes]) -> None:
    for name, text in texts.items():
        replace_file(staging / name, text, staging.parent)  # on a full disk the earlier file stays whole


def _rename(staging: Path, home: Path, digest: str, targets: tuple[str, ...] = ()) -> Artifact | None:
    """Rename `staging` to `home`. Returns another writer's artifact, verified, if that is there; None if ours is.

    With `targets`, an artifact for other GPUs is replaced: every request for these would refuse it.
    """
    others: list[Artifact] = []

    def is_valid(final: Path) -> bool:
        try:
            artifact = open_artifact(final, digest)
        except ArtifactInvalid:
            return False
        if artifact is None or (targets and artifact.manifest.targets not in ((), targets)):
            return False
        others.append(artifact)
        return True

    if rename_into_place(staging, home, is_valid, quarantine_of(home)):
        return None
    return others[-1]


def read_contents(artifact: Artifact) -> dict[str, bytes]:
    """All files of an opened artifact as they travel, checked once more. Raises `ArtifactInvalid`."""
    root = artifact.path
    try:
        check_directory(os.fspath(root))
        return {entry.name: _read_file(root, entry) for entry in artifact.manifest.files}
    except OSError as error:
        raise ArtifactUnreadable(f"{artifact.path} cannot be read: {error}") from error
