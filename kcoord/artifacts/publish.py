"""Publishing: a staged directory becomes an artifact by one `rename`, which one writer wins.

The table of what `rename` may answer was measured on local disks and on NFS v3 and v4.1:

===================== ======================================================================
``0``                 published
``EEXIST, ENOTEMPTY`` somebody won; theirs is used if it verifies, else quarantined
``ENOENT``            a resent NFS rename may have been done: look for our own token in the target
``EXDEV, EACCES, …``  `StoreError`, with the remedy; the caller trains on with its own copy
===================== ======================================================================

A directory rename replaces an *empty* directory, so never make one at a final name.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from kcoord.artifacts.arch import recorded_targets
from kcoord.artifacts.manifest import HOME_PLACEHOLDER, MANIFEST_NAME, FileEntry, Manifest, Origin, home_token
from kcoord.artifacts.reading import read_plain
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.keys.cache_key import CacheKey

_REMEDIES = {
    errno.EXDEV: "it is on another file system than its staging directory: make it one directory of one file system",
    errno.EACCES: "permission denied: let this user write to it",
    errno.EPERM: "not permitted: let this user write to it",
    errno.EROFS: "it is on a read-only file system: mount it read-write, or unset it",
    errno.ENOSPC: "its file system is full: free space, or run 'kcoord gc'",
    errno.EDQUOT: "the quota is used up: free space, or run 'kcoord gc'",
    errno.ENOENT: "it has vanished: create it, or mount it",
    errno.ENOTDIR: "a part of its path is a file: name a directory",
    errno.ESTALE: "its NFS handle is stale: mount it again",
    errno.EIO: "input/output error: look at the file system's log",
    errno.ENAMETOOLONG: "its path is too long: use a shorter one",
}

_WRONG = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}  # the path is: nobody mends that while the job runs


def store_error(error: OSError, where: Path) -> StoreError:
    """`error` as one line that names the path and the remedy."""
    remedy = _REMEDIES.get(error.errno or 0, error.strerror or str(error))
    return StoreError(f"{where}: {remedy}", remedy, passing=error.errno not in _WRONG)


def fault_of(root: Path, error: StoreError) -> str:
    """What a notice about `error` is about: equal for all that one fault of one disk does, whichever file it hits."""
    return f"{root}: {error.remedy}"


def seal(staging: Path, key: CacheKey, compile_seconds: float, origin: Origin, home: Path | None = None) -> Manifest:
    """`describe` the files in `staging`, and write the manifest, last. Raises `ArtifactInvalid` as `describe` does."""
    manifest = describe(staging, key, compile_seconds, origin, home)
    (staging / MANIFEST_NAME).write_bytes(manifest.encode())
    return manifest


def describe(
    staging: Path, key: CacheKey, compile_seconds: float, origin: Origin, home: Path | None = None
) -> Manifest:
    """Hash every file in `staging`; nothing is written.

    Files with `HOME_PLACEHOLDER`, or with the name of `home` itself, are relocatable. Raises `ArtifactInvalid` if
    `staging` holds nothing, anything but plain files and directories, or what no manifest can state.
    """
    files = tuple(sorted(_entries(staging, home), key=lambda f: f.name))
    if not files:
        raise ArtifactInvalid(f"{key.name}: the compile function wrote no file into its staging directory")
    manifest = Manifest(key, files, max(0.0, compile_seconds), origin, targets=recorded_targets(staging))
    try:
        encoded = manifest.encode()
    except UnicodeEncodeError as error:
        raise ArtifactInvalid(f"{key.name}: a name in its manifest is not UTF-8: {error.object!r}") from error
    Manifest.decode(encoded)  # what nobody could read back is not published
    return manifest


def _entries(staging: Path, home: Path | None) -> Iterator[FileEntry]:
    for directory, folders, names in os.walk(staging):
        for name in folders + names:
            path = Path(directory, name)
            mode = path.lstat().st_mode
            relative = path.relative_to(staging).as_posix()
            if stat.S_ISDIR(mode) or relative == MANIFEST_NAME:
                continue
            if not stat.S_ISREG(mode):
                raise ArtifactInvalid(f"{relative} is neither a plain file nor a directory")
            content = path.read_bytes()
            relocatable = False
            if relative.endswith(".json"):
                if home is not None:  # settled by an agent that was killed before it could rename
                    content = content.replace(home_token(home), HOME_PLACEHOLDER)
                relocatable = HOME_PLACEHOLDER in content
            yield FileEntry(relative, len(content), hashlib.sha256(content).hexdigest(), relocatable)


def write_files(directory: Path, contents: dict[str, bytes], *, durable: bool) -> None:
    """Write named contents below `directory`; `durable`: fsync each, so that they survive a crash."""
    for name, content in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Some file systems cannot do that with a directory, and need not."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def refresh_names(directory: Path) -> None:
    """Make an NFS client that cached a name of `directory` as missing look again: opening it does, `stat` does not.

    Raises OSError, FileNotFoundError too if `directory` itself is cached as missing.
    """
    os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))


def _make(directory: Path) -> None:
    """`mkdir`, never of its parents: where a mount has vanished they would be made on the disk below.

    An NFS client that cached the new name as missing looks again.
    """
    try:
        directory.mkdir()
    except FileExistsError:
        return
    with contextlib.suppress(OSError):  # made it is
        os.utime(directory.parent)


def rename_into_place(
    staging: Path,
    final: Path,
    manifest_name: str,
    is_valid: Callable[[Path], bool | None],
    quarantine: Path,
    *,
    durable: bool,
) -> bool:
    """Publish `staging` at `final`, whose parent's parent exists. True: ours is there. False: another writer's valid one is.

    `is_valid` judges another writer's; one that fails is moved into `quarantine`, one that is gone by then (None) is not. A
    loser's staging directory is removed. Not guaranteed: that the winner is still there when this returns. Raises `StoreError`.
    """
    why = "another's artifact comes and goes there: does something clean this directory?"
    try:
        token = (staging / manifest_name).read_bytes()  # names its writer and moment: nobody else has its like
        _make(final.parent)
        if durable:
            sync_directory(staging)
        for _ in range(3):
            won = _rename(staging, final, manifest_name, token)
            if won:
                if durable:
                    sync_directory(final.parent)
                with contextlib.suppress(OSError):  # published it is
                    os.utime(final.parent)  # an NFS client that cached "missing" looks again
                return True
            valid = is_valid(final)
            if valid:
                shutil.rmtree(staging, ignore_errors=True)
                return False
            if valid is not None:
                why = "three invalid artifacts in a row were found there: check who writes to the directory"
                set_aside(final, quarantine)
    except OSError as error:
        raise store_error(error, final) from error
    raise StoreError(f"{final}: {why}", why)


def _rename(staging: Path, final: Path, manifest_name: str, token: bytes) -> bool:
    try:
        staging.rename(final)
    except OSError as error:
        with contextlib.suppress(OSError):
            refresh_names(
                final.parent
            )  # an NFS client that saw the name missing is not told better by what just failed
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        if error.errno == errno.ENOTDIR and final.parent.is_dir():
            return False  # a file or a symbolic link is there, and no artifact
        if error.errno == errno.ENOENT and _holds(final / manifest_name, token):
            return True
        raise
    return True


def _holds(manifest: Path, token: bytes) -> bool:
    try:
        return read_plain(manifest, len(token)) == token
    except (OSError, ArtifactInvalid):  # a pipe of a stranger's would be waited for
        return False


def set_aside(path: Path, quarantine: Path) -> None:
    """Move a directory out of the way, to be looked at later. Whoever is reading it goes on reading."""
    quarantine.mkdir(parents=True, exist_ok=True)
    try:
        path.rename(quarantine / f"{path.name}-{uuid.uuid4().hex[:12]}")
    except FileNotFoundError:
        return  # another process moved it first


def staging_name() -> str:
    """A name for a staging directory that tells whose it is and that nobody else has: ``<host>-<pid>-<token>``.

    The token begins with `place`: hosts, and containers of one host, may have one name, and then the same pids.
    """
    return f"{os.uname().nodename}-{os.getpid()}-{place()}{uuid.uuid4().hex[:12]}"


def place() -> str:
    """Eight hex digits for this boot of this kernel and this pid namespace; within it a pid names one process at a time."""
    return _place(os.getpid())


@functools.lru_cache(maxsize=1)
def _place(pid: int) -> str:
    """`pid` is our own: a forked child may be in another namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return uuid.uuid4().hex[:8]  # nobody else's: not to be judged by its pid
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:8]
