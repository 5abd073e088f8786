"""NineToothed as a `Backend`: libraries that ``build`` and ``make(caller="cuda")`` compile ahead of time.

A request is traced: its key holds the Triton source of each kernel, so all that the script's functions have read. The kernels
that ``make`` hands to Triton are Triton's backend's; `kcoord.backends.ninetoothed.sources` makes their keys agree.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.backends.backend import Backend
from kcoord.backends.ninetoothed import files
from kcoord.backends.ninetoothed.gpus import gpu
from kcoord.backends.ninetoothed.request import Library
from kcoord.backends.ninetoothed.traces import digest_of
from kcoord.backends.triton.tools import triton_tools
from kcoord.backends.triton.variables import VARIABLES
from kcoord.errors import KeyFactorError
from kcoord.interruption import let_through
from kcoord.keys.device import DeviceKey, GPUTarget
from kcoord.keys.environment import TOOLCHAIN_VARIABLES
from kcoord.keys.host import host_abi
from kcoord.keys.packages import identity_of

_AOT = "ninetoothed.aot"


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
        files.write_header(aot)
        # Not in `staging`: if its disk is full nvcc fails, and an OSError of the copies is cured.
        with tempfile.TemporaryDirectory(prefix="kcoord-ninetoothed-") as directory:
            built, records = Path(directory, "built"), Path(directory, "records")
            built.mkdir()
            records.mkdir()
            handle = request.compile(built, records)
            request.made = {record.name for record in records.iterdir()}
            files.collect(aot, request.name, built, staging)
        files.install(aot, request.name, staging, request.output)
        return handle

    def required(self, request: Library) -> tuple[str, ...]:
        return (f"{request.name}.so", f"{request.name}.h")

    def unchanged(self, request: Library) -> bool:
        """True if the processes that compiled have traced what this one has."""
        return request.made == {digest_of(each["trace"]) for each in request.traces}

    def load(self, request: Library, artifact: Artifact) -> Any:
        aot = sys.modules[_AOT]
        handle = aot._load_launch_func(request.name, artifact.path)
        files.install(aot, request.name, artifact.path, request.output)
        return handle


backend = NineToothedBackend()
