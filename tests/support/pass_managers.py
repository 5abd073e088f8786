"""Native runs of an MLIR pass manager, below kcoord's wrapper of it, whichever of the two came first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def before_each_run(manager: Any, made: Callable[[str], bool], call: Callable[[], None]) -> None:
    """Call ``call()`` before passes run whose pipeline's text ``made(text)`` accepts."""
    code = getattr(manager.run, "__code__", None)
    cell = manager.run.__closure__[code.co_freevars.index("native")] if code is not None else None
    native = manager.run if cell is None else cell.cell_contents

    def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if made(str(self)):
            call()
        return native(self, *arguments, **keywords)

    if cell is None:
        manager.run = run
    else:
        cell.cell_contents = run
