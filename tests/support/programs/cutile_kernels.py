"""A cuTile kernel for a GPU that need not be there. ``cutile_kernels.py MODE...`` prints one line of JSON."""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import sys
from pathlib import Path
from typing import Any

modes = set(sys.argv[1:])
if "torch" in modes:
    import torch
if not modes & {"launched", "newer"}:
    import kcoord

    kcoord.install()

import cuda.tile as ct  # noqa: E402
from cuda.tile import _compile, compilation  # noqa: E402

if "late" in modes:
    import torch  # noqa: F401
if "newer" in modes:
    assemble = _compile.compile_cubin

    def newer(*args: Any, added: int = 0, **kwargs: Any) -> Any:
        return assemble(*args, **kwargs)

    parameters = inspect.signature(assemble).parameters.values()
    added = inspect.Parameter("added", inspect.Parameter.KEYWORD_ONLY, default=0)
    newer.__signature__ = inspect.Signature([*parameters, added])  # type: ignore[attr-defined]
    _compile.compile_cubin = newer
    import kcoord

    kcoord.install()
    hooked = _compile.compile_cubin
    _compile.compile_cubin = lambda *args, **kwargs: hooked(*args, added=int("used" in modes), **kwargs)
if "unwritable" in modes:
    import shutil

    copyfile = shutil.copyfile

    def refuse(source: Any, target: Any) -> Any:
        if Path(target).name == "kernel.cubin":
            raise OSError(28, "no space is left")
        return copyfile(source, target)

    shutil.copyfile = refuse

compiles: list[str] = []
native = _compile._CompilerBinary.run


def run(binary: Any, args: list[str], *more: Any, **keywords: Any) -> None:
    if not Path(args[0]).name.startswith("probe"):
        compiles.append(args[0])
    native(binary, args, *more, **keywords)


_compile._CompilerBinary.run = run


@ct.kernel
def scale(source, target):  # type: ignore[no-untyped-def]
    at = ct.bid(0)
    ct.store(target, index=(at,), tile=ct.load(source, index=(at,), shape=(64,)) * 3.0)


array = compilation.ArrayConstraint(
    dtype=ct.float32, ndim=1, index_dtype=ct.int32, stride_lower_bound_incl=0, alias_groups=(), may_alias_internally=False
)  # fmt: skip
signature = compilation.KernelSignature(
    [array, array], calling_convention=compilation.CallingConvention.cutile_python_v1()
)
cubin = io.BytesIO()
compilation.export_kernel(scale, [signature], cubin, gpu_code="sm_89", output_format="cubin")
print(json.dumps({"code": hashlib.sha256(cubin.getvalue()).hexdigest(), "compiles": len(compiles)}))
