"""A real browser for pages: headless Chromium, its DOM after scripts ran, and screenshots as pixels."""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-device-scale-factor=1",
)  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """A screenshot: `width` × `height` pixels of three bytes."""

    width: int
    height: int
    pixels: bytes

    def at(self, x: int, y: int) -> tuple[int, int, int]:
        start = 3 * (y * self.width + x)
        red, green, blue = self.pixels[start : start + 3]
        return red, green, blue

    def count(self, colour: str) -> int:
        """The pixels that have the colour ``#rrggbb``."""
        red, green, blue = bytes.fromhex(colour[1:])
        triples = zip(self.pixels[0::3], self.pixels[1::3], self.pixels[2::3], strict=True)
        return sum(1 for triple in triples if triple == (red, green, blue))


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

    def picture(
        self, page: Path | str, view: str = "", *, dark: bool = False, size: tuple[int, int] = (1200, 900)
    ) -> Picture:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "page.png"
            flags = [f"--screenshot={file}", f"--window-size={size[0]},{size[1]}"]
            self._run(page, view, *flags, *(["--force-dark-mode"] if dark else []))
            return decode_png(file.read_bytes())

    def _run(self, page: Path | str, view: str, *flags: str) -> bytes:
        with tempfile.TemporaryDirectory() as profile:
            address = (page.as_uri() if isinstance(page, Path) else page) + (f"#{view}" if view else "")
            command = [self._command, *_FLAGS, f"--user-data-dir={profile}", *flags, address]
            done = subprocess.run(command, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout


def decode_png(content: bytes) -> Picture:
    """A PNG of 8-bit RGB or RGBA, not interlaced: what Chromium writes."""
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    at, compressed, width, height, channels = 8, b"", 0, 0, 0
    while at < len(content):
        (length,), kind = struct.unpack(">I", content[at : at + 4]), content[at + 4 : at + 8]
        body = content[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colours, *_, interlaced = struct.unpack(">IIBBBBB", body)
            assert depth == 8
            assert not interlaced
            channels = {2: 3, 6: 4}[colours]
        elif kind == b"IDAT":
            compressed += body
        at += 12 + length
    plain, stride = zlib.decompress(compressed), width * channels
    before, rows = bytearray(stride), bytearray()
    for row in range(height):
        start = row * (stride + 1)
        line = _unfiltered(plain[start], bytearray(plain[start + 1 : start + 1 + stride]), before, channels)
        rows += line
        before = line
    if channels == 4:
        del rows[3::4]
    return Picture(width, height, bytes(rows))


def _unfiltered(kind: int, line: bytearray, above: bytearray, step: int) -> bytearray:
    """One row, whose bytes are differences to what is left and above (PNG specification, section 9)."""
    if kind == 0:
        return line
    if kind == 2:
        return bytearray((a + b) & 255 for a, b in zip(line, above, strict=True))
    for n in range(len(line)):
        left = line[n - step] if n >= step else 0
        corner = above[n - step] if n >= step else 0
        if kind == 1:
            guess = left
        elif kind == 3:
            guess = (left + above[n]) // 2
        else:
            guess = min((left, above[n], corner), key=lambda c: abs(left + above[n] - corner - c))
        line[n] = (line[n] + guess) & 255
    return line
