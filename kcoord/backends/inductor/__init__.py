"""Inductor, the compiler behind ``torch.compile``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kcoord.backends.compiler import Compiler
from kcoord.settings import Settings

CACHE = "TORCHINDUCTOR_CACHE_DIR"


class _Inductor(Compiler):
    def child_environ(self, settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
        """Torch's own caches are this user's alone, too: what a lead finds there, it shares.

        Where signatures are required they are of their own: torch uses the libraries that an earlier job put there.
        """
        directory = f"{self.name}-signed" if settings.policy == "require" else self.name
        return {CACHE: environ.get(CACHE) or str(settings.local_dir / directory)}

    def tiers(self, environ: Mapping[str, str]) -> dict[str, Path]:
        chosen = environ.get(CACHE)
        return {CACHE: Path(chosen)} if chosen else {}


COMPILER = _Inductor(
    "inductor",
    "kcoord.backends.inductor.adapter:backend",
    modules={
        "torch._inductor.compile_fx": "kcoord.backends.inductor.hooks",
        "torch._inductor.fx_passes.pad_mm": "kcoord.backends.inductor.padding",  # which a warm rank does not import
    },
    packages={"torch": (2, 11)},
)
