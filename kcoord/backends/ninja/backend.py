"""C++ and CUDA extensions that ``torch.utils.cpp_extension`` builds with ninja while the job runs, as a `Backend`.

Torch lets the first process of a directory build, behind a lock file without an owner: if that process is killed, the next job
waits for ever. Here every build has a directory of its own, and callers load the published library.
"""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.backends.base import UNLOADED, Backend
from kcoord.keys.device import DeviceKey, Scope
from kcoord.keys.environment import TOOLCHAIN_VARIABLES
from kcoord.keys.host import cpu_features, host_abi
from kcoord.keys.tools.commands import Inputs


@dataclass(frozen=True)
class Extension:
    """A library to build. `name` has the version that torch gives an extension which changes in mid-process.

    `arguments` are torch's, for its functions that write the ninja file and build; `inputs` is what that file reads.
    """

    name: str
    is_python_module: bool
    arguments: Mapping[str, Any] = field(repr=False)
    inputs: Inputs = field(repr=False)

    @property
    def library(self) -> str:
        from torch.utils import cpp_extension

        return f"{self.name}{cpp_extension.LIB_EXT}"


class NinjaBackend(Backend[Extension, Any]):
    """A handle is the module, or the path of the library whose operators were loaded."""

    name = "ninja"
    modules = ("torch.utils.cpp_extension",)
    packages = MappingProxyType({"torch": (2, 8)})
    variables = TOOLCHAIN_VARIABLES
    scope = Scope.TARGET
    keeps_handles = False  # each call imports a module anew, as without kcoord

    def hook(self) -> None:
        from kcoord.backends.ninja import hooks

        hooks.hook(self)

    def label(self, request: Extension) -> str:
        return request.name

    def factors(self, request: Extension) -> Mapping[str, Any]:
        import torch

        inputs = request.inputs
        return {
            "build": inputs.text,
            "files": inputs.files,
            "module": request.is_python_module,
            "torch": (str(torch.__version__), torch.version.git_version),
            "abi": host_abi(),
            "cpu": cpu_features() if "native" in inputs.text else (),
        }

    def tools(self, request: Extension) -> Collection[str]:
        return request.inputs.tools

    def device(self, request: Extension) -> DeviceKey | None:
        return None  # for the host, and for the GPUs that the flags name

    def compile(self, request: Extension, staging: Path) -> Any:
        from torch.utils import cpp_extension

        build = cpp_extension._write_ninja_file_and_build_library
        with tempfile.TemporaryDirectory(prefix="build-", dir=staging) as directory:
            arguments = {**request.arguments, "build_directory": directory}
            build(**{name: value for name, value in arguments.items() if name in inspect.signature(build).parameters})
            shutil.copyfile(Path(directory, request.library), staging / request.library)
        return UNLOADED

    def required(self, request: Extension) -> tuple[str, ...]:
        return (request.library,)

    def unchanged(self, request: Extension) -> bool:
        return request.inputs.unchanged()

    def load(self, request: Extension, artifact: Artifact) -> Any:
        from torch.utils import cpp_extension

        return cpp_extension._import_module_from_library(request.name, str(artifact.path), request.is_python_module)
