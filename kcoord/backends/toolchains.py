"""Choices of a machine that has compilers, for machines that borrow them: the record of its compilers, and lists of headers.

They are signed and judged as artifacts are. A process offers the record after the first compile that it has
published.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Sequence

from kcoord.artifacts.choices import LARGEST_CHOICE
from kcoord.backends.fail_open import fails_open
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.environment import TOOLCHAIN_VARIABLES, Environment
from kcoord.keys.tools.record import ROLES
from kcoord.keys.tools.toolchain import tool_factors, toolchain_here, tools
from kcoord.rank.coordinator import Coordinator

_COMPILERS = frozenset(itertools.chain(*ROLES.values()))
_first = threading.Lock()
_environment = Environment(TOOLCHAIN_VARIABLES)


@fails_open(lambda coordinator, key: None)
def record_toolchain(coordinator: Coordinator, key: CacheKey) -> None:
    """Nothing is recorded for a `key` without such compilers, as most of Triton's are."""
    found = {part.name.partition("/")[0] for factor in key.factors if factor.name == "tools" for part in factor.parts}
    if coordinator.settings.store is None or _COMPILERS.isdisjoint(found) or not _first.acquire(blocking=False):
        return
    toolchain = toolchain_here(coordinator.settings.local_dir)
    if toolchain.tools and coordinator.choices.get(toolchain.key) is None:
        coordinator.choices.offer(toolchain.key, toolchain.asked().encode(), 0.0)


class SharedHeaderLists:
    """As `kcoord.keys.tools.commands.HeaderLists`."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def get(self, compiler: str, asked: Sequence[str]) -> bytes | None:
        return self._coordinator.choices.get(self._key(compiler, asked))

    def offer(self, compiler: str, asked: Sequence[str], content: bytes) -> None:
        if self._coordinator.settings.store is not None and len(content) <= LARGEST_CHOICE:
            self._coordinator.choices.offer(self._key(compiler, asked), content, 0.0)

    def _key(self, compiler: str, asked: Sequence[str]) -> CacheKey:
        return CacheKey.of(
            "headers",
            compiler.rpartition("/")[2],
            compile=list(asked),
            env=_environment.read(),
            torch=str(getattr(sys.modules.get("torch"), "__version__", "")),  # its headers name each other
            **tool_factors(tools({"compiler": compiler}, self._coordinator.settings.local_dir)),
        )
