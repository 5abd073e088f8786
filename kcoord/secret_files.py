"""Files that hold a secret: who else may read them, and how a Kubernetes Secret that is mounted lacks one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kcoord.errors import SettingsError

LARGEST = 64 << 10  # bytes
_KUBELETS = "..data"  # what the kubelet puts into a volume of a Secret, also of one that is not there


def read_secret(name: str, path: Path) -> bytes:
    """The content of a plain file that no other user can read or change.

    It is this user's alone, or root's, whose group may read it and nobody else: so Kubernetes mounts a Secret for a container
    that is not root, with the pod's ``fsGroup``. Symbolic links are followed, as those of such a volume must be: what counts is
    the file that is read. Not looked at: who may write to the directories above it, and access control lists.

    Raises `SettingsError` that begins with `name`, in which there is nothing of the content.
    """
    try:
        with open(path, "rb", opener=_open) as file:  # it closes what it cannot use, a directory
            _check_owner(name, os.fstat(file.fileno()))  # of the very file that is read
            content = file.read(LARGEST + 1)
    except PermissionError as error:
        raise SettingsError(
            f"{name}: {error.strerror}: let this user read it (of a Kubernetes Secret: by the pod's fsGroup)"
        ) from error
    except OSError as error:
        raise SettingsError(f"{name}: {error.strerror}: name a file that this user may read") from error
    if len(content) > LARGEST:
        raise SettingsError(f"{name}: it has more than {LARGEST} bytes: name the file of the secret")
    return content


def is_left_out(path: Path) -> bool:
    """Whether `path` would be a key of a mounted Kubernetes Secret that has no such key, or is not there (``optional: true``)."""
    for _ in range(2):  # a look that began before the kubelet put new secrets there, and ends after, finds nothing
        try:
            path.stat()
        except FileNotFoundError:
            continue
        except OSError:
            pass  # whoever reads it says why not
        return False
    return os.path.lexists(path.parent / _KUBELETS)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe is not waited for


def _check_owner(name: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise SettingsError(f"{name}: it is no plain file")
    if found.st_uid not in (os.getuid(), 0):
        raise SettingsError(f"{name}: it belongs to user {found.st_uid}: it must be this user's, or root's")
    others = 0o077 if found.st_uid == os.getuid() else 0o037
    if found.st_mode & others:
        raise SettingsError(
            f"{name}: others may read or write it: chmod 600 (of a Kubernetes Secret: defaultMode: 0440)"
        )
