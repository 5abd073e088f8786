"""The local tier: artifacts on the node's own disk, each a directory in its compiler's own layout.

A *home* is an artifact's directory, ``<root>/<name>``; beside the homes lie ``<root>/.kcoord/staging`` and
``<root>/.kcoord/quarantine``, on the same file system, so that publishing is one rename.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from kcoord.artifacts.describe import (
    describe,
    seal,
)
from kcoord.artifacts.manifest import (
    HOME_PLACEHOLDER,
    LARGEST_MANIFEST,
    MANIFEST_NAME,
    Manifest,
    Origin,
    check_content,
    home_token,
    largest_at_home,
    portable,
)
from kcoord.errors import ArtifactInvalid, ArtifactUnreadable, StoreError
from kcoord.files.faults import (
    store_error,
)
from kcoord.files.naming import (
    staging_name,
)
from kcoord.files.reading import read_plain
from kcoord.files.rename import (
    rename_into_place,
    set_aside,
    write_files,
)
from kcoord.keys.cache_key import CacheKey


@dataclass(frozen=True)
class Artifact:
    """An artifact in the local tier: immutable files below `path`, verified when it was opened."""

    path: Path
    manifest: Manifest

    @property
    def key(self) -> CacheKey:
        return self.manifest.key


def open_artifact(home: Path, digest: str | None = None) -> Artifact | None:
    """The artifact at `home`, every byte of it checked; None if there is none. What does not verify is read once more, afresh.

    Raises `ArtifactInvalid` if what is there is torn, altered, or (with `digest`) another key's; `ArtifactUnreadable` if this
    process cannot tell.
    """
    try:
        return _open(home, digest, afresh=False)
    except ArtifactInvalid:
        return _open(home, digest, afresh=True)


def _open(home: Path, digest: str | None, *, afresh: bool) -> Artifact | None:
    root = os.fspath(home)
    try:
        encoded = read_plain(f"{root}/{MANIFEST_NAME}", LARGEST_MANIFEST, afresh=afresh)
    except (FileNotFoundError, NotADirectoryError):
        return None  # whatever is there a moment later: it is published by one rename, and whole from its first moment
    except OSError as error:
        raise _unreadable(home, error) from error
    try:
        if os.path.islink(root):  # noqa: PTH114
            raise ArtifactInvalid(f"{home} is a symbolic link")
        manifest = Manifest.decode(encoded)
        if digest is not None and manifest.key.digest != digest:
            raise ArtifactInvalid(f"{home} holds the artifact of another key")
        for entry in manifest.files:
            if "/" in entry.name:
                _check_way(root, entry.name)
            most = largest_at_home(entry, home)
            check_content(entry, portable(entry, read_plain(f"{root}/{entry.name}", most, afresh=afresh), home))
    except (FileNotFoundError, NotADirectoryError) as error:
        if (home / MANIFEST_NAME).exists():
            raise ArtifactInvalid(f"{home} lacks {error.filename}") from error
        return None
    except OSError as error:
        raise _unreadable(home, error) from error
    return Artifact(home, manifest)


def _unreadable(home: Path, error: OSError) -> ArtifactInvalid:
    """A disk that cannot read it will not for others; that this process has too many files open says nothing of it."""
    of_the_disk = error.errno in (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EISDIR)
    return (ArtifactInvalid if of_the_disk else ArtifactUnreadable)(f"{home} cannot be read: {error}")


def _check_way(root: str, name: str) -> None:
    """Raises `ArtifactInvalid` if a directory on the way to a file is a symbolic link."""
    way = root
    for part in name.split("/")[:-1]:
        way = f"{way}/{part}"
        if os.path.islink(way):  # noqa: PTH114
            raise ArtifactInvalid(f"{way} is a symbolic link")


def is_whole(home: Path, digest: str, targets: tuple[str, ...] = ()) -> bool:
    """Whether `home` holds the whole artifact of `digest`; with `targets`, one that does not say it is for other GPUs."""
    try:
        artifact = open_artifact(home, digest)
    except ArtifactInvalid:
        return False
    return artifact is not None and (not targets or artifact.manifest.targets in ((), targets))


def new_staging(home: Path, room: int = 0) -> Path:
    """A fresh, private directory from which `home` can be published by a rename, with so many bytes free. Raises `StoreError`."""
    staging = home.parent / ".kcoord" / "staging" / staging_name()
    try:
        staging.mkdir(mode=0o700, parents=True)
        if room and not _has_room(staging, room):
            staging.rmdir()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise store_error(error, staging.parent) from error
    return staging


def takes_files(staging: Path, room: int) -> bool:
    """Whether `staging` is there, and its disk takes a file, and so many bytes: tried, since a quota is not to be seen."""
    probe = staging.with_name(f"{staging.name}.probe")
    try:
        if not staging.is_dir() or not _has_room(staging, room):
            return False
        try:
            probe.write_bytes(os.urandom(64 << 10))
        finally:
            probe.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _has_room(directory: Path, room: int) -> bool:
    """Raises OSError."""
    disk = os.statvfs(directory)
    return disk.f_blocks == 0 or disk.f_bavail * disk.f_frsize >= room  # some file systems do not say


def quarantine_of(home: Path) -> Path:
    return home.parent / ".kcoord" / "quarantine"


def quarantine(home: Path) -> None:
    """Move an invalid artifact aside. Raises `StoreError`."""
    try:
        set_aside(home, quarantine_of(home))
    except OSError as error:
        raise store_error(error, home) from error


def publish_local(staging: Path, home: Path, key: CacheKey, compile_seconds: float, origin: Origin) -> Artifact:
    """Seal `staging` and rename it to `home`; whoever won, return what is there.

    Raises `ArtifactInvalid` (nothing was staged) or `StoreError` (the directory cannot be written). The staged files
    are then as they were, so that they can be published again, or adopted.
    """
    try:
        manifest = seal(staging, key, compile_seconds, origin, home)
    except OSError as error:
        raise store_error(error, staging) from error
    try:
        _settle(staging, home, manifest)
        return _place(staging, home, key.digest, manifest.targets)
    except StoreError:
        _unsettle(staging, home, manifest)
        raise
    except OSError as error:
        _unsettle(staging, home, manifest)
        raise store_error(error, staging) from error


def adopt(staging: Path, key: CacheKey, compile_seconds: float, origin: Origin) -> Artifact:
    """Use staged files where they are: for this process alone, on a disk that may be full. No manifest is written.

    Raises `ArtifactInvalid` if there are no files, or they cannot be read.
    """
    try:
        manifest = describe(staging, key, compile_seconds, origin, staging)
    except OSError as error:
        raise ArtifactInvalid(f"{staging} cannot be read: {error}") from error
    with contextlib.suppress(OSError):  # what names its own directory is read by others, and there are none
        _settle(staging, staging, manifest)
    return Artifact(staging, manifest)


def install(manifest: Manifest, contents: dict[str, bytes], home: Path) -> Artifact:
    """Write an artifact that came from elsewhere to `home`, and return what is there then.

    `contents` are portable and already checked against `manifest`. Raises `StoreError`.
    """
    staging = new_staging(home)
    try:
        write_files(staging, contents, durable=False)
        _settle(staging, home, manifest)
        (staging / MANIFEST_NAME).write_bytes(manifest.encode())
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise store_error(error, home) from error
    try:
        return _place(staging, home, manifest.key.digest)
    except StoreError:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _settle(staging: Path, home: Path, manifest: Manifest) -> None:
    """Write the final directory's name into the relocatable files."""
    _replace_in(staging, manifest, HOME_PLACEHOLDER, home_token(home))


def _unsettle(staging: Path, home: Path, manifest: Manifest) -> None:
    """Take `_settle` back, as far as the disk allows it."""
    with contextlib.suppress(OSError):
        _replace_in(staging, manifest, home_token(home), HOME_PLACEHOLDER)


def _replace_in(staging: Path, manifest: Manifest, old: bytes, new: bytes) -> None:
    for entry in manifest.files:
        path = staging / entry.name
        if entry.relocatable and old in (content := path.read_bytes()):
            part = staging.with_name(f"{staging.name}.part")
            try:
                part.write_bytes(content.replace(old, new))
                part.replace(path)  # on a full disk the file stays whole
            finally:
                part.unlink(missing_ok=True)


def _place(staging: Path, home: Path, digest: str, targets: tuple[str, ...] = ()) -> Artifact:
    """With `targets`, what is for others of them is no winner: it would be refused whenever it is asked for."""
    valid = functools.partial(is_whole, digest=digest, targets=targets)
    rename_into_place(staging, home, MANIFEST_NAME, valid, quarantine_of(home), durable=False)
    try:
        artifact = open_artifact(home, digest)
    except ArtifactInvalid as error:
        raise StoreError(f"{home}: what was just published does not verify ({error}): check the disk") from error
    if artifact is None:
        raise StoreError(f"{home}: it vanished right after it was published: does something clean this directory?")
    return artifact


def read_contents(artifact: Artifact) -> dict[str, bytes]:
    """All files of an artifact as they travel, checked once more. Raises `ArtifactInvalid`."""
    contents = {}
    for entry in artifact.manifest.files:
        try:
            content = read_plain(artifact.path / entry.name, largest_at_home(entry, artifact.path))
        except OSError as error:
            raise ArtifactUnreadable(f"{artifact.path} cannot be read: {error}") from error
        content = portable(entry, content, artifact.path)
        check_content(entry, content)
        contents[entry.name] = content
    return contents
