"""NineToothed's ``make`` of a library under the backend suite, for a GPU that need not be there."""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kcoord

Path(os.environ["HOME"]).mkdir(exist_ok=True)  # where NineToothed makes a directory
kcoord.install()

import ninetoothed  # noqa: E402
import torch  # noqa: E402
from ninetoothed import Tensor, aot  # noqa: E402

from kcoord.testing import Subject, main  # noqa: E402

vars(torch._C).setdefault("_cuda_getCurrentRawStream", lambda device: 0)
SPECS = next(name for name in vars(aot) if name in ("_enumerate_stride_specs", "_enumerate_variant_specs"))
OPTIONS = {"num_warps": 4, "num_stages": 2}


NATIVE = getattr(aot, SPECS)


def one(*arguments: Any) -> Any:
    """The last of a kernel's variants but for that of huge tensors: one is compiled sooner than five."""
    return [spec for spec in NATIVE(*arguments) if "i64" not in spec][-1:]


def in_order(directory: Path, pattern: str, native: Any = Path.glob) -> list[Path]:
    """As `Path.glob`. Files that are linked in another order are another library."""
    return sorted(native(directory, pattern))


def double(value: Any) -> Any:
    return value * 2


def triple(value: Any) -> Any:
    return value * 3


BY = 1
SIZES = [16]
helper = double
setattr(aot, SPECS, one)
Path.glob = in_order  # type: ignore[assignment, method-assign]


def application(source, target):  # type: ignore[no-untyped-def] # NineToothed would write the types into its source
    target = helper(source)  # noqa: F841


def premake(number: int) -> Any:
    def arrangement(source: Any, target: Any) -> Any:
        size = number * sizes[0] * BY
        return source.tile((size,)), target.tile((size,))

    sizes = SIZES
    return arrangement, application, (Tensor(1, dtype="fp32"), Tensor(1, dtype="fp32"))


class NineToothed(Subject):
    def __init__(self) -> None:
        self.count = 0
        self.pause: Callable[[], None] = lambda: None
        native = aot._aot

        @functools.wraps(native)
        def compile(*arguments: Any, **keywords: Any) -> Any:
            self.count += 1
            self.pause()
            return native(*arguments, **keywords)

        aot._aot = compile

    def build(self, number: int) -> bytes:
        name, output = f"scale{number}", Path(os.environ["HOME"], f"out{number}")
        output.mkdir(exist_ok=True)
        ninetoothed.make(*premake(number), caller="cuda", kernel_name=name, output_dir=output, **OPTIONS)
        return code_of((output / f"{name}.so").read_bytes())

    def refuse(self) -> None:
        os.environ["NVCC_APPEND_FLAGS"] = "--no-such-flag"
        self.build(8)

    def compiles(self) -> int:
        return self.count

    def before_each_compile(self, pause: Callable[[], None]) -> None:
        self.pause = pause

    def change(self, name: str) -> None:
        global BY, helper
        if name == "a global":
            BY = 2
        elif name == "a closure":
            SIZES[0] = 64
        elif name == "a helper":
            helper = triple
        elif name == "arch":
            os.environ["STANDIN_ARCH"] = "80"
        else:
            os.environ[name] = "-O2"


def code_of(library: bytes) -> bytes:
    """The instructions of the GPU's code in `library`, and the size of its own, which holds distances to the names of files."""
    at = library.index(b"\x7fELF", 4)
    gpu = b"".join(library[at + offset : at + offset + size] for offset, size in instructions(library[at:]))
    return hashlib.sha256(gpu).digest() + str([size for _, size in instructions(library)]).encode()


def instructions(elf: bytes) -> list[tuple[int, int]]:
    """Offsets and sizes of the executable sections."""
    sections, size, count = *struct.unpack_from("<Q", elf, 40), *struct.unpack_from("<HH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, sections + each * size) for each in range(count)]
    return [(offset, length) for _, kind, flags, _, offset, length in headers if kind == 1 and flags & 4]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(NineToothed)
