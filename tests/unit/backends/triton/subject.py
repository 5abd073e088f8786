"""Triton under the backend suite, for a GPU that need not be there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kcoord

kcoord.install()

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kcoord.testing import Subject, main  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[3] / "support" / "programs"))

import kernels  # noqa: E402

TARGET = GPUTarget("cuda", int(os.environ.get("ARCH", "90")), 32)


class Triton(Subject):
    def __init__(self) -> None:
        self.count = 0
        self.pause: Callable[[], None] = lambda: None
        make_ir = ASTSource.make_ir

        def counted(source: Any, *arguments: Any, **keywords: Any) -> Any:
            self.count += 1
            self.pause()
            return make_ir(source, *arguments, **keywords)

        ASTSource.make_ir = counted

    def build(self, number: int) -> bytes:
        code: bytes = kernels.build_scale(number + 2, target=TARGET).asm["cubin"]
        return code

    def refuse(self) -> None:
        kernels.build_broken()

    def compiles(self) -> int:
        return self.count

    def before_each_compile(self, pause: Callable[[], None]) -> None:
        self.pause = pause

    def change(self, name: str) -> None:
        os.environ["TRITON_DISABLE_LINE_INFO"] = "1"


if __name__ == "__main__":
    main(Triton)
