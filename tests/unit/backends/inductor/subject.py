"""Inductor under the backend suite: units of torch.compile, on the CPU, of matrix products alone: no C++ is built."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

os.makedirs(os.environ["HOME"], exist_ok=True)  # noqa: PTH103
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=os.environ["HOME"])  # torch's own caches answer nothing
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # workers would import torch, each process its own

import kcoord  # noqa: E402

kcoord.install()

import torch  # noqa: E402
from torch._inductor import compile_fx  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402

from kcoord.testing import Subject, main  # noqa: E402


class Inductor(Subject):
    def __init__(self) -> None:
        self.count, self.refuses = 0, False
        self.pause: Callable[[], None] = lambda: None
        self.codes: list[str] = []
        GraphLowering.save_output_code = self.codes.append
        generate = compile_fx.fx_codegen_and_compile

        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.count += 1
            self.pause()
            if self.refuses:
                raise NotImplementedError("no such operator")
            return generate(*arguments, **keywords)

        compile_fx.fx_codegen_and_compile = counted

    def build(self, number: int) -> bytes:
        self.codes.clear()
        torch._dynamo.reset()
        x = torch.ones(4, 4)

        def product(x: torch.Tensor) -> torch.Tensor:
            for _ in range(number + 1):
                x = x @ x
            return x

        torch.compile(product)(x)
        code = "\n".join(self.codes)
        # it counts compiles
        return "\n".join(line for line in code.splitlines() if not line.startswith("# AOT ID")).encode()

    def refuse(self) -> None:
        self.refuses = True
        try:
            self.build(7)
        finally:
            self.refuses = False

    def compiles(self) -> int:
        return self.count

    def before_each_compile(self, pause: Callable[[], None]) -> None:
        self.pause = pause

    def change(self, name: str) -> None:
        torch._inductor.config.size_asserts = False


if __name__ == "__main__":
    main(Inductor)
