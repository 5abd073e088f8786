"""``python -m benchmarks.cluster.profile``: compile 300 real kernels and record their CPU seconds, for the simulated cluster.

Needs Triton and PyTorch, and no GPU: all kernels are compiled for sm_90. A compile spends its CPU seconds (of this process and of
its assembler) in one thread, so that other work of the machine is not in the figures.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("compile_seconds.json")

_TILES = (
    (64, 64, 32), (128, 64, 32), (64, 128, 32), (128, 128, 32),
    (128, 128, 64), (256, 64, 32), (64, 256, 32), (256, 128, 64),
)  # fmt: skip
_LAYOUTS = ((False, True), (False, False), (True, False))
_WIDTHS = tuple(2**n for n in range(6, 14))


def kernels() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    """Name, kernel, constants and options of the autotuned kernels of a transformer's training step."""
    from benchmarks.cluster.attention import attention_forward
    from examples import kernels as ours

    for (m, n, k), (a, b), warps, stages in itertools.product(_TILES, _LAYOUTS, (4, 8), (3, 4)):
        constants = {"TRANS_A": a, "TRANS_B": b, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
        yield (
            f"matmul {m}x{n}x{k}{' At' * a}{' Bt' * b}",
            ours.matmul,
            constants,
            {"num_warps": warps, "num_stages": stages},
        )
    rowwise = (ours.softmax_forward, ours.softmax_backward, ours.layer_norm_forward, ours.layer_norm_backward)
    for kernel, width, warps in itertools.product(rowwise, _WIDTHS, (4, 8, 16)):
        yield f"{kernel.__name__} {width}", kernel, {"BLOCK": width}, {"num_warps": warps}
    for m, n, head, causal in itertools.product((64, 128), (32, 64, 128), (64, 128), (False, True)):
        for warps, stages in ((4, 2), (4, 3), (8, 2), (8, 3), (8, 4))[: 5 if causal else 4]:
            constants = {"HEAD": head, "BLOCK_M": m, "BLOCK_N": n, "CAUSAL": causal}
            yield (
                f"attention {m}x{n}x{head}{' causal' * causal}",
                attention_forward,
                constants,
                {"num_warps": warps, "num_stages": stages},
            )


def build(kernel: Any, constants: dict[str, Any], options: dict[str, int]) -> None:
    """Compile one of `kernels` for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        return "*fp32" if name.endswith("_ptr") else "fp32" if name in ("scale", "eps") else "i32"

    signature = {name: kind(name) for name in kernel.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, k in enumerate(signature.values()) if k in ("*fp32", "i32")}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> None:
    import triton

    def seconds(kernel: Any, constants: dict[str, Any], options: dict[str, int]) -> float:
        begun = cpu_seconds()
        build(kernel, constants, options)
        return round(cpu_seconds() - begun, 3)

    recorded = []
    with tempfile.TemporaryDirectory(prefix="kcb-") as directory:
        os.environ["TRITON_CACHE_DIR"] = directory
        from examples.kernels import softmax_forward

        seconds(softmax_forward, {"BLOCK": 32}, {"num_warps": 1})  # the first one also hashes Triton's own library
        for name, kernel, constants, options in kernels():
            shown = " ".join([name, *(f"{option[4:]}={value}" for option, value in options.items())])
            recorded.append((shown, seconds(kernel, constants, options)))
            print(len(recorded), *recorded[-1], flush=True)
    recorded.sort(key=lambda entry: -entry[1])
    what = f"CPU seconds of real compiles by Triton {triton.__version__} for sm_90, by benchmarks/cluster/profile.py"
    lines = ",\n".join(json.dumps(entry) for entry in recorded)
    RECORDED.write_text(f'{{"what": {json.dumps(what)},\n"kernels": [\n{lines}\n]}}\n')


def cpu_seconds() -> float:
    """CPU seconds of this process, and of the assemblers that it started."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usages)


if __name__ == "__main__":
    main()
