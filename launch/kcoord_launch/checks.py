"""Checks of the settings before a job starts: directories, and secret files. Each check of a file system is bounded."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from typing import TypeVar

from kcoord.artifacts.signing import Trust
from kcoord.artifacts.store import Store
from kcoord.errors import SettingsError, StoreError
from kcoord.files.daemon import in_daemon
from kcoord.files.private import make_tier
from kcoord.settings import SECRET_FILES, Settings, variable
from kcoord_launch.console import say

T = TypeVar("T")
_PATIENCE = 20.0  # seconds that a file system has to answer before the job starts


def checked_settings(flags: dict[str, str | None], flag_prefix: str = "--", *, is_job: bool = True) -> Settings:
    """The settings, with writable directories. Raises `SettingsError`: one line, with the remedy.

    If the local directory can never be used, a job runs without kcoord: one line says so, and `disable` is set: one
    bad node must not end a job of many. It is an error without a job (`is_job`), and under KCOORD_TRUST=require.
    """
    settings = Settings.of_job(flag_prefix, **flags)
    if settings.disable:
        return settings
    files = " and ".join(variable(name) for name in SECRET_FILES if getattr(settings, name) is not None)
    settings = bounded(lambda: _checked_secrets(settings), files, settings)
    try:
        check_directories(settings)
    except UnusableLocalDir as error:
        if settings.trust == "require" or not is_job:
            raise
        say(f"{error}; the job runs without kcoord")
        return replace(settings, disable=True)
    return settings


class UnusableLocalDir(SettingsError):
    """The local directory can never be used on this node."""


def check_directories(settings: Settings, *, store: bool = True) -> None:
    """Raises `SettingsError` if the local directory (`UnusableLocalDir`) or, with `store`, the store can never be used.

    A disk that is full, read-only or out of reach now is a warning of the agent's: the job starts.
    """
    try:
        make_tier(settings.local_dir)
    except StoreError as error:
        if not error.passing:
            raise UnusableLocalDir(f"KCOORD_LOCAL_DIR={error}") from error
    if settings.store is not None and store:
        if settings.store.is_relative_to(settings.local_dir):
            say(
                f"KCOORD_STORE={settings.store} is in KCOORD_LOCAL_DIR, which is for this node and user alone: "
                "name a directory that all nodes share"
            )
        try:
            _open_store(settings)
        except StoreError as error:
            if not error.passing:
                raise SettingsError(f"KCOORD_STORE={error}") from error


def _checked_secrets(settings: Settings) -> Settings:
    """The settings without absent files of a mounted Secret. Raises `SettingsError` if a secret cannot be used."""
    mounted = settings.as_mounted()
    if mounted.spawn:  # else another process starts the agent, with its keys
        Trust.of(mounted)
        mounted.redis_address()
    return mounted


def _open_store(settings: Settings) -> None:
    root = settings.store_root
    assert root is not None

    def attempt() -> None:
        trust = Trust.of(settings) if settings.spawn else Trust(settings.trust or "off")
        Store(root, trust, creates=settings.store_create).open()

    bounded(attempt, f"KCOORD_STORE={settings.store}", None)


def bounded(work: Callable[[], T], subject: str, otherwise: T) -> T:
    """The result of `work`, in a thread: a file system that hangs is a warning, and the job starts. Raises what `work` raises."""
    working = in_daemon(work)
    if wait({working}, timeout=_PATIENCE).done:
        return working.result()
    say(f"{subject}: no answer for {_PATIENCE:g} s; the job starts without waiting for it")
    return otherwise
