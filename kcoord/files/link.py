"""Publishing one file in a shared directory: it is written in staging, and `link` gives it its final name, once.

A rename of a file replaces what is there, so two writers may both believe that they published; of two links one fails.

=========================== ==================================================================================
result of `link`            then
=========================== ==================================================================================
0                           published, if the final name is the file that was written
EEXIST                      what is there holds, whoever made it; if it does not verify it is moved aside
ENOENT, ESTALE              the staged file was swept, or NFS sent the request twice: the final name is looked at
ENOSPC, EDQUOT, EROFS,      `StoreError` with the remedy
EACCES
any other                   a file system without links, perhaps: unless the final name holds, `rename`
=========================== ==================================================================================

After a link was tried, its staged file is not written again: it may be a second name of what is published. So each attempt
writes another one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from kcoord.errors import StoreError
from kcoord.files import beneath
from kcoord.files.atomic import staging_name
from kcoord.files.faults import store_error, store_errors
from kcoord.files.rename import sync_directory

_ATTEMPTS = 3
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_UNSTAGED = (errno.ENOENT, errno.ESTALE)
_RESTLESS = "its name changes hands all the time: check who writes to the directory"


def publish_file(
    final: Path,
    root: Path,
    staging: Path,
    write: Callable[[BinaryIO], object],
    holds: Callable[[], bool],
) -> bool:
    """Publish what ``write(file)`` writes as `final`. True: it is ours; False: another's holds, which ``holds()`` has judged.

    ``holds()`` is False if nothing is at the final name, or what was there did not verify, and was moved aside. `staging` lies
    below `root` (`kcoord.files.beneath`) as `final` does, whose directory is made, and no other. Mode 0666 less the umask;
    durable once this returns. Raises `StoreError`, and what the functions raise.
    """
    failure: OSError | None = None
    for _ in range(_ATTEMPTS):
        staged = staging / f"{staging_name()}.part"
        try:
            with store_errors(root):
                beneath.check(staging, root)
                with staged.open("wb") as file:
                    write(file)
                    file.flush()
                    os.fsync(file.fileno())
                    ours = os.fstat(file.fileno())
                _make_directory(final.parent, root)
            failure = None
            try:
                beneath.link(staged, final, root)
                is_ours = _is(final, ours, root)
            except OSError as error:
                failure, is_ours = error, False
                if error.errno in _REFUSED:
                    raise store_error(error, final) from error
            if not is_ours and holds():
                return False
            if failure is not None and failure.errno not in (errno.EEXIST, *_UNSTAGED):
                with store_errors(final):
                    beneath.rename(staged, final, root)
                is_ours = True
        finally:
            beneath.remove(staged, root)  # a sweep removes what a fault keeps, once this process is gone
        if is_ours:
            with store_errors(final):
                sync_directory(final.parent)
            return True
    if failure is not None and failure.errno != errno.EEXIST:
        raise store_error(failure, final) from failure
    raise StoreError(f"{final}: {_RESTLESS}", _RESTLESS)


def _is(final: Path, ours: os.stat_result, root: Path) -> bool:
    """True if `final` is the file with the status `ours`. Opened, for an NFS client that saw the name missing."""
    try:
        with beneath.opened(final.parent, root) as here:
            descriptor = os.open(final.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
        try:
            return os.path.samestat(os.fstat(descriptor), ours)
        finally:
            os.close(descriptor)
    except OSError:
        return False


def _make_directory(directory: Path, root: Path) -> None:
    """Make `directory` if need be. Its parent is touched then, so that an NFS client that saw the name missing looks again."""
    with suppress(FileNotFoundError), beneath.opened(directory, root):
        return
    try:
        beneath.mkdir(directory, root)
    except FileExistsError:
        return
    with suppress(OSError):
        beneath.touched(directory.parent, root)
