"""Secret files: their readers are checked, and keys that a mounted Kubernetes Secret lacks are recognized."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kcoord.errors import SettingsError

LARGEST = 64 << 10  # bytes
_KUBELETS = "..data"  # the kubelet puts it into the volume of a Secret, even of a missing one


def read_secret(name: str, path: Path) -> bytes:
    """The content of a plain file that no other user can read or change.

    The file is this user's alone; or it is root's, and only its group may read it: so Kubernetes mounts a Secret for a container
    that is not root, with the pod's ``fsGroup``. Symbolic links are followed, as such a volume requires, and the file behind them
    is checked. Not checked: writers of the directories above it, and access control lists.

    Raises `SettingsError`, which begins with `name` and never holds the content.
    """
    try:
        # `open` closes a descriptor that it cannot use, such as a directory's
        with open(path, "rb", opener=_open) as file:
            _check_owner(name, os.fstat(file.fileno()))  # the file that is read, not the path
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
    """True if `path` is in the volume of a Kubernetes Secret that lacks this key, or is missing itself (``optional: true``)."""
    for _ in range(2):  # a look during the kubelet's exchange of secrets finds nothing
        try:
            path.stat()
        except FileNotFoundError:
            continue
        except OSError:
            pass  # reading it raises the reason
        return False
    return os.path.lexists(path.parent / _KUBELETS)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # do not wait for a pipe


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
