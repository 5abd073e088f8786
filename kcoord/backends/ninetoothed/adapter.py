"""NineToothed as a `Backend`: libraries that ``build`` and ``make(caller="cuda")`` compile ahead of time.

A request is traced: its key holds the Triton source of each kernel, so all that the script's functions have read. The kernels
that ``make`` hands to Triton are Triton's backend's; `kcoord.backends.ninetoothed.sources` makes their keys agree.

Users compile the C++ sources of a library into programs of their own, so the directory that they named has all that NineToothed
would write there, but for the libraries of a build's single kernels. Sources name a header in the user's home: an artifact holds
a placeholder.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.backends.backend import Backend
from kcoord.backends.fail_open import notices
from kcoord.backends.ninetoothed.request import Library, gpu
from kcoord.backends.ninetoothed.sources import read, write_whole
from kcoord.backends.ninetoothed.traces import digest_of
from kcoord.backends.triton.tools import triton_tools
from kcoord.backends.triton.variables import VARIABLES
from kcoord.errors import KeyFactorError
from kcoord.files.faults import store_error
from kcoord.interruption import let_through
from kcoord.keys.device import DeviceKey, GPUTarget
from kcoord.keys.environment import TOOLCHAIN_VARIABLES
from kcoord.keys.host import host_abi
from kcoord.keys.packages import identity_of

_AOT = "ninetoothed.aot"
_HEADER = b"@KCOORD_NINETOOTHED_H@"
_TEXT = (".cpp", ".h")
_CODE = "device-code.elf"
"""The header of a kernel's machine code, which names its GPU."""
_ELF = re.compile(rb"0x7f, 0x45, 0x4c, 0x46(?:, 0x[0-9a-f]{2}){60}")


class NineToothedBackend(Backend[Library, Any]):
    """A handle is the function that launches the library's kernel."""

    name = "ninetoothed"
    variables = MappingProxyType(
        {**TOOLCHAIN_VARIABLES, **VARIABLES, "TRITON_DEFAULT_BACKEND": "which of Triton's drivers answers"}
    )
    keeps_handles = False  # each call loads anew, as without kcoord

    def label(self, request: Library) -> str:
        return request.name

    def factors(self, request: Library) -> Mapping[str, Any]:
        python = shutil.which("python")
        if python is None or Path(python).parent != Path(sys.executable).parent:
            raise KeyFactorError("NineToothed runs Triton's compiler with the python of PATH, which is not this one")
        try:
            request.traces, request.gpu = request.trace(), gpu()
        except KeyFactorError:
            raise
        except Exception as error:  # the script's or NineToothed's, which the compile raises again
            let_through(error)
            raise KeyFactorError(f"it cannot be traced: {type(error).__name__}: {error}") from error
        return {
            "kernels": request.traces,
            "gpu": request.gpu.factors,
            "packages": [identity_of("ninetoothed"), identity_of("triton")],
            "abi": host_abi(),
        }

    def tools(self, request: Library) -> Mapping[str, str]:
        found = {"nvcc": "nvcc", "gcc": "gcc", "g++": "g++", "NVCC_CCBIN": os.environ.get("NVCC_CCBIN", "")}
        return {**{label: tool for label, tool in found.items() if tool}, **triton_tools("cuda")}

    def target(self, request: Library) -> GPUTarget | None:
        return None if request.gpu is None else request.gpu.target

    def device(self, request: Library) -> DeviceKey | None:
        return None  # NineToothed opens the GPU in other processes

    def compile(self, request: Library, staging: Path) -> Any:
        aot = sys.modules[_AOT]
        _write_header(aot)
        # Not in `staging`: if its disk is full nvcc fails, and an OSError of the copies is cured.
        with tempfile.TemporaryDirectory(prefix="kcoord-ninetoothed-") as directory:
            built, records = Path(directory, "built"), Path(directory, "records")
            built.mkdir()
            records.mkdir()
            handle = request.compile(built, records)
            request.made = {record.name for record in records.iterdir()}
            _collect(aot, request.name, built, staging)
        _install(aot, request.name, staging, request.output)
        return handle

    def required(self, request: Library) -> tuple[str, ...]:
        return (f"{request.name}.so", f"{request.name}.h")

    def unchanged(self, request: Library) -> bool:
        """True if the processes that compiled have traced what this one has."""
        return request.made == {digest_of(each["trace"]) for each in request.traces}

    def load(self, request: Library, artifact: Artifact) -> Any:
        aot = sys.modules[_AOT]
        handle = aot._load_launch_func(request.name, artifact.path)
        _install(aot, request.name, artifact.path, request.output)
        return handle


def _write_header(aot: Any) -> None:
    """Have the header that all sources include, whole. `aot` is NineToothed's module. Raises OSError."""
    aot._HEADER_PATH.parent.mkdir(exist_ok=True)
    write_whole(aot._HEADER_PATH, aot._HEADER_CONTENT.encode())


def _collect(aot: Any, name: str, built: Path, staging: Path) -> None:
    """Copy the files of library `name` from the directory `built`. Raises OSError."""
    for file in sorted(built.iterdir()):
        content = file.read_bytes()
        if file.suffix in _TEXT:
            (staging / file.name).write_bytes(content.replace(str(aot._HEADER_PATH).encode(), _HEADER))
            if found := _ELF.search(content):
                (staging / _CODE).write_bytes(bytes(int(each, 16) for each in found[0].split(b", ")))
        elif file.name == f"{name}.so":
            (staging / file.name).write_bytes(content)


def _install(aot: Any, name: str, directory: Path, output: Path) -> None:
    """Have the library's files in `output`, each one whole; the same ones are left alone.

    NineToothed's mark of what it built there goes with the library that it is of. A directory that takes no files is told of: the
    library works without.
    """
    try:
        _write_header(aot)
        for file in sorted(directory.iterdir()):
            content = file.read_bytes()
            if file.suffix in _TEXT:
                content = content.replace(_HEADER, str(aot._HEADER_PATH).encode())
            elif file.suffix != ".so":
                continue
            elif read(output / file.name) != content:
                (output / f"{name}.fingerprint").unlink(missing_ok=True)
            write_whole(output / file.name, content)
    except OSError as error:
        let_through(error)
        notices.tell(f"{store_error(error, output)}; {name} is used without its files there")


backend = NineToothedBackend()
