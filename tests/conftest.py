"""A clean environment for every test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.support.sandbox import Sandbox, is_foreign, sandboxed


def pytest_configure() -> None:
    """Under nohup, or in a script's background, signals are ignored, here and in whatever a test starts."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if is_foreign(name):
            monkeypatch.delenv(name)


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with sandboxed() as box:
        yield box
