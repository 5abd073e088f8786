"""NineToothed's kernels on a GPU that is not there. ``ninetoothed_kernels.py MODE`` prints one line of JSON.

``make`` makes a kernel for Triton after ``$EARLIER`` other tensors, and launches it; ``launched`` does so without
`kcoord.install`. ``keys`` compiles nothing, and tells the keys of libraries that differ in one input each. Other modes build a
library in ``$HOME/$OUTPUT``: ``lazy`` calls it as well, ``tuned`` asks for an
autotuned one, ``moved`` changes a global that the processes of ``build`` do not see, ``differs`` does it with a NineToothed of
another release.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

mode = sys.argv[1] if len(sys.argv) > 1 else ""
if mode not in ("launched", "differs"):
    import kcoord

    kcoord.install()

import ninetoothed  # noqa: E402
import ninetoothed.language as ntl  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from ninetoothed import Tensor, aot, block_size  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

module = sys.modules["ninetoothed.build"]
OUTPUT = Path(os.environ["HOME"], os.environ.get("OUTPUT", "out"))
BY = 1
OPTIONS = {"num_warps": 4, "num_stages": 2}
vars(torch._C).setdefault("_cuda_getCurrentRawStream", lambda device: 0)
torch.cuda.current_device = lambda: 0
specs = next(name for name in vars(aot) if name in ("_enumerate_stride_specs", "_enumerate_variant_specs"))
compiles: list[str] = []
every = vars(aot)[specs]


def one(*arguments: Any) -> Any:
    return [spec for spec in every(*arguments) if "i64" not in spec][-1:]


def counted(place: Any, name: str) -> None:
    native = getattr(place, name)

    def compile(*arguments: Any, **keywords: Any) -> Any:
        compiles.append(name)
        return native(*arguments, **keywords)

    setattr(place, name, compile)


vars(aot)[specs] = one
counted(ASTSource, "make_ir")
counted(module, "_generate_launch_func")


@triton.jit
def plus(value):  # type: ignore[no-untyped-def]
    return value + 1


@triton.jit
def times(value):  # type: ignore[no-untyped-def]
    return value * 2


@triton.jit
def minus(value):  # type: ignore[no-untyped-def]
    return value - 3


def tuned(left: Any, right: Any, product: Any) -> Any:
    return arrangement(left, right, product, block_size(), block_size())


def arrangement(left: Any, right: Any, product: Any, rows: Any = 32, columns: Any = 32) -> Any:
    product = product.tile((rows, columns))
    left = left.tile((rows, 16)).tile((1, -1)).expand((-1, product.shape[1]))
    left.dtype = left.dtype.squeeze(0)
    right = right.tile((16, columns)).tile((-1, 1)).expand((product.shape[0], -1))
    right.dtype = right.dtype.squeeze(1)
    return left, right, product


def application(left, right, product):  # type: ignore[no-untyped-def]
    found = ntl.zeros(product.shape, dtype=ntl.float32)
    for k in range(left.shape[0]):
        found += ntl.dot(plus(left[k]), times(right[k]))
    product = minus(found)


def premake(size: int) -> Any:
    def tiled(source: Any, target: Any) -> Any:
        return source.tile((size * BY,)), target.tile((size * BY,))

    return tiled, copied, (Tensor(1, dtype="fp32"), Tensor(1, dtype="fp32"))


def copied(source, target):  # type: ignore[no-untyped-def]
    target = source  # noqa: F841


def earlier() -> None:
    for _ in range(int(os.environ.get("EARLIER", "0"))):
        Tensor(2)
        block_size()


def made() -> list[str]:
    """The files of a kernel that is to be tuned, and of one that is launched."""
    earlier()
    kernels = [
        ninetoothed.make(each, application, (Tensor(2), Tensor(2), Tensor(2)), max_num_configs=2, **OPTIONS)
        for each in (tuned, arrangement)
    ]
    kernels[1](*(torch.ones(64, 64) for _ in range(3)))
    return [Path(kernel._launch.__code__.co_filename).name for kernel in kernels]


def built(**more: Any) -> Any:
    OUTPUT.mkdir(exist_ok=True)
    configs = ([((16,), {}, OPTIONS)], [])[mode == "tuned"]
    return ninetoothed.build(premake, iter(configs), kernel_name="copy", output_dir=str(OUTPUT), **more)


def halves(value):  # type: ignore[no-untyped-def]
    return value / 2


def doubles(value):  # type: ignore[no-untyped-def]
    return value + value


def another() -> Any:
    @triton.jit
    def plus(value):  # type: ignore[no-untyped-def]
        return value + 2

    return plus


helper = halves


def helped(source, target):  # type: ignore[no-untyped-def]
    target = helper(source)  # noqa: F841


def calls(source, target):  # type: ignore[no-untyped-def]
    target = plus(source)  # noqa: F841


varying: dict[str, Any] = {}


def varied() -> Any:
    """It has no parameters: they would be in the kernel's name."""
    return variation(**varying)


def variation(
    rank: int = 1, size: int = 16, dtype: str = "fp32", application: Any = copied, other: Any = None, tiled: Any = None
) -> Any:
    def tile(source: Any, target: Any) -> Any:
        shape = (1,) * (rank - 1) + (size * BY,)
        return source.tile(shape), target.tile(shape)

    return tiled or tile, application, (Tensor(rank, dtype=dtype, other=other), Tensor(rank, dtype=dtype))


def strided(source: Any, target: Any) -> Any:
    return source.tile((16,), strides=(8,)), target.tile((16,), strides=(8,))


def keys() -> dict[str, str]:
    """The key of each library, by the input in which it differs from the first."""
    global BY, helper, plus
    from kcoord.backends.ninetoothed import adapter

    found: dict[str, str] = {}
    row = ""

    def obtain(self: Any, request: Any, native: Any) -> None:
        found[row] = self.key(request).digest

    adapter.NineToothedBackend.obtain = obtain  # type: ignore[method-assign, misc]
    OUTPUT.mkdir(exist_ok=True)
    earlier()

    def ask(name: str, *options: Any, kernel: str = "copy", **more: Any) -> None:
        nonlocal row
        row = name
        varying.clear()
        varying.update(more)
        configs = [((), {}, {**OPTIONS, **each}) for each in options or ({},)]
        ninetoothed.build(varied, configs, kernel_name=kernel, output_dir=OUTPUT)

    ask("nothing")
    ask("number of dimensions", rank=2)
    ask("arrangement", tiled=strided)
    ask("constant", size=32)
    ask("type", dtype="fp16")
    ask("padding", other=1.0)
    ask("application", application=helped)
    helper = doubles
    ask("helper", application=helped)
    ask("call of a function of Triton", application=calls)
    plus = another()
    ask("function of Triton", application=calls)
    ask("warps", {"num_warps": 8})
    ask("stages", {"num_stages": 3})
    ask("name", kernel="other")
    ask("configurations", {}, {"num_warps": 8})
    BY = 4
    ask("global")
    BY = 1
    for variable, value in (("STANDIN_ARCH", "80"), ("NVCC_APPEND_FLAGS", "-O1"), ("TRITON_DEFAULT_FP_FUSION", "0")):
        before = os.environ.get(variable)
        os.environ[variable] = value
        ask(variable)
        os.environ.pop(variable)
        os.environ.update({variable: before} if before else {})
    identity_of = adapter.identity_of
    for package in ("triton", "ninetoothed"):
        adapter.identity_of = lambda name, changed=package: f"{identity_of(name)}{name == changed}"
        ask(f"release of {package}")
    adapter.identity_of = identity_of
    arrangement, application, tensors = variation()
    row = "make"
    ninetoothed.make(arrangement, application, tensors, "cuda", "copy", OUTPUT, **OPTIONS)
    return found


def main() -> dict[str, Any]:
    global BY
    if mode in ("make", "launched"):
        return {"sources": made()}
    if mode == "keys":
        return {"keys": keys()}
    if mode == "tuned":
        try:
            built(meta_parameters=("size",))
        except (StopIteration, subprocess.CalledProcessError) as error:  # there is nothing to tune
            return {"error": type(error).__name__}
    elif mode == "lazy":
        kernel = built(lazy=True)
        before = len(compiles)
        kernel(torch.ones(16), torch.ones(16), 16, 4, 2)
        return {"before": before}
    elif mode == "differs":
        import kcoord

        del module._make  # type: ignore[attr-defined]
        kcoord.install()
    else:
        BY = 2 if mode == "moved" else 1
        built()
    return {"files": sorted(file.name for file in OUTPUT.glob("*"))}


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = main()
    print(json.dumps({**found, "compiles": len(compiles)}))
