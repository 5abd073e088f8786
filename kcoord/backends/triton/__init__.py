"""Triton, which finds kcoord by ``TRITON_CACHE_MANAGER`` and keeps kernels in a layout of its own, by its own key."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

from kcoord.backends.compiler import Compiler
from kcoord.settings import Settings

MANAGER = "kcoord.backends.triton.cache_manager:TritonCacheManager"
GROUP = "__grp__"
"""Prefix of the file in which Triton lists a kernel's files."""
OLDEST = (3, 4)
MODULES = "triton-module"
"""The name of the backend of the C modules that Triton builds."""
OWN_KEY = "triton_key"


def version_of(release: str) -> tuple[int, ...]:
    """The first two numbers of ``3.9.0``."""
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in release.split(".")[:2])


def base32(digest: str) -> str:
    """A hash in hex, as Triton names directories by it."""
    return base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")


class _Triton(Compiler):
    def obstacle(self, environ: Mapping[str, str]) -> tuple[str, str] | None:
        manager = environ.get("TRITON_CACHE_MANAGER") or MANAGER
        if manager == MANAGER:
            return None
        return f"TRITON_CACHE_MANAGER={manager} is set", "unset it: kcoord leaves Triton to it"

    def child_environ(self, settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
        directory = environ.get("TRITON_CACHE_DIR") or str(settings.local_dir / self.name)
        return {"TRITON_CACHE_MANAGER": MANAGER, "TRITON_CACHE_DIR": directory}

    def tiers(self, environ: Mapping[str, str]) -> dict[str, Path]:
        chosen = environ.get("TRITON_CACHE_DIR")
        return {"TRITON_CACHE_DIR": Path(chosen)} if chosen else {}


COMPILER = _Triton(
    "triton",
    "kcoord.backends.triton.adapter:backend",
    modules={"triton": "kcoord.backends.triton.hooks"},
    packages={"triton": OLDEST, "torch": (2, 11)},
    imports=frozenset({"TRITON_CACHE_MANAGER"}),
)
