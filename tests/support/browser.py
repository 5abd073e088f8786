"""A real browser for pages: headless Chromium, and its DOM after scripts ran."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-device-scale-factor=1",
)  # fmt: skip


class Browser:
    """Opens pages of this machine. Skips the test, with the reason, where there is no Chromium."""

    def __init__(self) -> None:
        found = next(filter(None, map(shutil.which, _NAMES)), None)
        if found is None:
            pytest.skip(f"no browser: none of {', '.join(_NAMES)} is on PATH (apt-get install chromium)")
        self._command = found

    def dom(self, page: Path | str, view: str = "", *, after: float = 0) -> str:
        """The page's HTML after its scripts ran, for `after` seconds of their clock. `view` is what follows # in its address."""
        return self._run(
            page, view, "--dump-dom", *([f"--virtual-time-budget={after * 1000:.0f}"] if after else [])
        ).decode()

    def _run(self, page: Path | str, view: str, *flags: str) -> bytes:
        with tempfile.TemporaryDirectory() as profile:
            address = (page.as_uri() if isinstance(page, Path) else page) + (f"#{view}" if view else "")
            command = [self._command, *_FLAGS, f"--user-data-dir={profile}", *flags, address]
            done = subprocess.run(command, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout
