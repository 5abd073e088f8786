"""Compilers that a job borrows: stubs, last on ``PATH``, of those that are missing on this node."""

from __future__ import annotations

import os
from pathlib import Path

from kcoord.artifacts import toolchains
from kcoord.artifacts.signing import Trust
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files.private import make_own
from kcoord.keys.tools.record import ROLES, missing_roles, write_stubs
from kcoord.settings import Settings, variable
from kcoord_launch.checks import bounded
from kcoord_launch.console import say


def borrow(settings: Settings) -> None:
    """Put the stubs of `Settings.toolchain` last on this process's ``PATH``; without it, say which toolchain would do.

    No fault of the store keeps the job from its start.
    """
    missing, root = missing_roles(), settings.store_root
    if root is not None and missing and not settings.disable:
        bounded(lambda: _borrow(settings, root, missing), f"{variable('store')}={settings.store}", None)


def _borrow(settings: Settings, root: Path, missing: list[str]) -> None:
    try:
        store = Store(root, Trust.of(settings))
        if settings.toolchain is None:
            _hint(store, missing)
            return
        toolchain = toolchains.found(store, settings.toolchain)
        directory = settings.local_dir / "borrowed" / toolchain.key.digest / "bin"
        make_own(directory)
        if write_stubs(directory, toolchain, missing):
            os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{directory}"
    except (StoreError, ArtifactInvalid, OSError) as error:
        if settings.toolchain is not None:
            say(f"{variable('toolchain')}={settings.toolchain}: {error}; the job runs with the compilers that are here")


def _hint(store: Store, missing: list[str]) -> None:
    """Says which of the named toolchains has all that is missing for host code."""
    wanted = {role: names for role, names in ROLES.items() if role in missing and role in ("C", "C++")}
    for name, toolchain in toolchains.named(store).items() if wanted else ():
        if all(toolchain.tools.keys() & set(names) for names in wanted.values()):
            say(
                f"no compiler of {' and '.join(wanted)} is on PATH; the store's artifacts of one load with"
                f" {variable('toolchain')}={name}"
            )
            return
