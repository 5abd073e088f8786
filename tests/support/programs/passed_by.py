"""Compiles two kernels or graphs. ``passed_by.py WHAT [MODE]`` prints the parts that kcoord stood aside from.

WHAT is ``kernels``, ``units`` or ``graphs``. A mode is something that the script does, or its state of affairs.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import triton
from torch._functorch import config as of_units
from torch._inductor import config
from triton.compiler.compiler import ASTSource
from triton.runtime.cache import FileCacheManager

import kcoord
from kcoord.backends.triton import adapter

what, mode = (*sys.argv[1:], "")[:2]
if mode != "under way":
    kcoord.install()

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
import kernels  # noqa: E402


def compile_kernels() -> None:
    if mode == "setting":
        triton.knobs.cache.manager_class = FileCacheManager
    elif mode == "variable":
        del os.environ["TRITON_CACHE_MANAGER"]
    elif mode == "fault":
        adapter.backend.begin = None  # type: ignore[assignment, method-assign]
    elif mode == "under way":
        make_ir = ASTSource.make_ir

        def meanwhile(*arguments: Any, **keywords: Any) -> Any:
            kcoord.install()
            return make_ir(*arguments, **keywords)

        ASTSource.make_ir = meanwhile
    found = []
    triton.knobs.compilation.listener = lambda **told: found.append(told["cache_hit"])
    for factor in (2, 3):
        kernels.build_scale(factor)
    assert found == [mode == "warm"] * 2


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def compile_graphs() -> None:
    of_units.enable_autograd_cache = what == "units"
    if mode == "problem":
        config.post_grad_custom_post_pass = None
        of_units._sync_decision_cross_ranks = True
    for width in (2, 3):
        x = torch.ones(width, width, requires_grad=True)
        function = Custom.apply if mode == "bypassed" else torch.matmul
        arguments = (x,) if mode == "bypassed" else (x, x)
        torch.compile(function)(*arguments).sum().backward()


compile_kernels() if what == "kernels" else compile_graphs()
print(json.dumps(kcoord.connect().counters.read()["stood_aside"]))
