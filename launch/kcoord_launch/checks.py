"""Checks of the settings before a job starts: directories, and secret files. Each check of a file system is bounded."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from kcoord.artifacts.signing import Trust
from kcoord.artifacts.store import Store
from kcoord.errors import Replaceable, SettingsError, StoreError
from kcoord.files.daemon import in_daemon
from kcoord.files.private import make_private
from kcoord.settings import SECRET_FILES, Settings, variable
from kcoord_launch.console import say

T = TypeVar("T")
_PATIENCE = 20.0  # seconds that a file system has to answer before the job starts


def checked_settings(flags: dict[str, str | None], flag_prefix: str = "--") -> Settings:
    """The settings, with writable directories. Raises `SettingsError`: one line, with the remedy.

    A local directory that is safe but for what is above it, or that nobody named, is no error: the job runs without kcoord.
    """
    settings = Settings.from_environ(None, flag_prefix, **flags)
    if settings.disable:
        return settings
    files = " and ".join(variable(name) for name in SECRET_FILES if getattr(settings, name) is not None)
    settings = _bounded(lambda: _checked_secrets(settings), files, settings)
    named = flags.get("local_dir") or os.environ.get(variable("local_dir"))
    check_directories(settings, tolerated=(Replaceable,) if named else (StoreError,))
    return settings


def check_directories(settings: Settings, *, tolerated: tuple[type[StoreError], ...] = (), store: bool = True) -> None:
    """Raises `SettingsError` if the local directory (but for `tolerated` errors) or, with `store`, the store can never be used.

    A disk that is full, read-only or out of reach now is a warning of the agent's: the job starts.
    """
    try:
        make_private(settings.local_dir)
    except StoreError as error:
        if not isinstance(error, tolerated):
            _refuse("KCOORD_LOCAL_DIR", error)
    if settings.store is not None and store:
        try:
            _open_store(settings)
        except StoreError as error:
            _refuse("KCOORD_STORE", error)


def _checked_secrets(settings: Settings) -> Settings:
    """The settings without absent files of a mounted Secret. Raises `SettingsError` if a secret cannot be used."""
    mounted = settings.as_mounted()
    if mounted.spawn:  # else another process starts the agent, with its keys
        Trust.of(mounted)
        mounted.redis_address()
    return mounted


def _refuse(variable: str, error: StoreError) -> None:
    if not error.passing:
        raise SettingsError(f"{variable}={error}") from error


def _open_store(settings: Settings) -> None:
    root = settings.store_root
    assert root is not None

    def attempt() -> None:
        trust = Trust.of(settings) if settings.spawn else Trust(settings.trust or "off")
        Store(root, trust, creates=settings.store_create).open()

    _bounded(attempt, f"KCOORD_STORE={settings.store}", None)


def _bounded(work: Callable[[], T], subject: str, otherwise: T) -> T:
    """The result of `work`, in a thread: a file system that hangs is a warning, and the job starts. Raises what `work` raises."""
    working = in_daemon(work)
    if wait({working}, timeout=_PATIENCE).done:
        return working.result()
    say(f"{subject}: no answer for {_PATIENCE:g} s; the job starts without waiting for it")
    return otherwise
