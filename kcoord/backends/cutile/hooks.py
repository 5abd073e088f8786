"""cuTile's assembler, answered by the backend: below launches, ``export_kernel``, the tuner and cuTile's own cache of cubins.

That cache, a database in ``CUDA_TILE_CACHE_DIR``, stays as it is. Its key holds the bytecode and the compiler's version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kcoord.backends.cutile.adapter import Bytecode, backend
from kcoord.backends.fail_open import fails_open
from kcoord.backends.reliances import Part, unknown_argument
from kcoord.backends.wrapping import wraps

_ASSEMBLER = "_compile:compile_cubin"
KERNELS = Part(
    "cutile",
    "cuda.tile",
    "kernels",
    {_ASSEMBLER: "fname_bytecode compiler_options sm_arch timeout_sec ...", "_compile:_CompilerBinary.run": "",
     "_compile:_find_compiler_bin": ""},
)  # fmt: skip
_KNOWN = {*KERNELS.parameters(_ASSEMBLER), "remarks_output_file", "preview_features", "linker_inputs"}


def hook() -> None:
    """Idempotent."""
    if KERNELS.holds():
        KERNELS.wrap(_ASSEMBLER, _answered)


def _answered(native: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(native)

    @wraps(native)
    def compile_cubin(*args: Any, **kwargs: Any) -> Any:
        def natively() -> Any:
            return native(*args, **kwargs)

        request = _request(signature, natively, args, kwargs)
        return natively() if request is None else backend.obtain(request, natively)

    return compile_cubin


@fails_open(lambda *arguments: None)
def _request(signature: inspect.Signature, natively: Callable[[], Path], args: Any, kwargs: Any) -> Bytecode:
    from cuda.tile import _compile

    bound = signature.bind(*args, **kwargs)
    given, remarks = bound.arguments, bound.arguments.get("remarks_output_file")
    return Bytecode(
        file=Path(given["fname_bytecode"]),
        options=given["compiler_options"],
        sm=given["sm_arch"],
        features=tuple(given.get("preview_features", ())),
        libraries=tuple(map(Path, given.get("linker_inputs", ()))),
        is_for_debugger=getattr(_compile, "EXPERIMENTAL_CUDA_TILE_DEBUG_BUILD", False),
        remarks=None if remarks is None else Path(remarks),
        other=unknown_argument(bound, _KNOWN),
        assemble=natively,
    )
