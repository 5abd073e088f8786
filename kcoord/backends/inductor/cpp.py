"""C++ that Inductor builds for the host: one build for all ranks, in the rank or in one of its compile workers.

Replaces ``torch._inductor.codecache._worker_compile_cpp``, which workers find by its name and module.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.backends.base import Backend
from kcoord.files.replace import replace_file
from kcoord.keys.device import DeviceKey, Scope
from kcoord.keys.host import cpu_features, host_abi

_LOCKED_FOR = 600  # seconds; torch's own bound


@dataclass(frozen=True)
class Build:
    """Files that are made of each other, in order; callers want the last one. `builders` are torch's, `lock` is its lock file."""

    builders: tuple[Any, ...]
    lock: str

    @property
    def target(self) -> Path:
        return Path(self.builders[-1].get_target_file_path())

    @property
    def sources(self) -> list[Path]:
        """The files that are read and not made."""
        made = {builder.get_target_file_path() for builder in self.builders}
        named = [name for builder in self.builders for name in builder._sources_args.split()]
        return [Path(name) for name in named if name not in made]


class CppBackend(Backend[Build, None]):
    """Loading puts the artifact's file where torch wants it; torch opens it."""

    name = "inductor-cpp"
    scope = Scope.TARGET
    keeps_handles = False

    def bypass(self, request: Build) -> str:
        last = request.builders[-1]
        if last.get_target_file_path().endswith(".so") and not last._use_relative_path:
            return ""
        return "headers are compiled for one directory"

    def label(self, request: Build) -> str:
        return f"cpp-{request.target.stem[:13]}"

    def factors(self, request: Build) -> Mapping[str, Any]:
        """Torch names files by a hash of their content and flags, and headers by their preprocessed text."""
        import torch
        from torch._inductor.codecache import cache_dir
        from torch._inductor.cpp_builder import get_compiler_version_info

        commands = [builder.get_command_line().replace(cache_dir(), "CACHE") for builder in request.builders]
        return {
            "sources": [path.read_bytes() for path in request.sources],
            "commands": commands,
            "compiler": get_compiler_version_info(request.builders[-1]._compiler),
            "torch": (str(torch.__version__), torch.version.git_version),
            "cpu": cpu_features(),  # -march=native
            "abi": host_abi(),  # a library that this host cannot open would end the job
        }

    def tools(self, request: Build) -> list[str]:
        return sorted({builder._compiler for builder in request.builders})

    def device(self, request: Build) -> DeviceKey | None:
        return None  # for the host; a worker must not initialize CUDA

    def compile(self, request: Build, staging: Path) -> None:
        _build(request)
        shutil.copyfile(request.target, staging / request.target.name)

    def required(self, request: Build) -> tuple[str, ...]:
        return (request.target.name,)

    def load(self, request: Build, artifact: Artifact) -> None:
        target = request.target
        if target.exists():
            return  # another rank of this node has put it there
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, (artifact.path / target.name).read_bytes())


_backend = CppBackend()


def build(lock_path: str, cpp_builders: Sequence[Any]) -> None:
    """As torch's ``_worker_compile_cpp``. The file is not locked while another rank builds."""
    request = Build(tuple(cpp_builders), lock_path)
    if not request.target.exists():
        _backend.obtain(request, lambda: _build(request))


def _build(request: Build) -> None:
    from torch.utils._filelock import FileLock

    with FileLock(request.lock, timeout=_LOCKED_FOR):
        for builder in request.builders:
            if not Path(builder.get_target_file_path()).exists():
                builder.build()


def replaces(native: Callable[..., Any]) -> bool:
    """True if `build` may stand in for this version's function."""
    names = native.__code__.co_varnames[: native.__code__.co_argcount]
    return names == ("lock_path", "cpp_builders")
