"""C++ that Inductor builds for the host: one build for all ranks, in the rank or in one of its compile workers.

Replaces ``torch._inductor.codecache._worker_compile_cpp``, which workers find by its name and module. Torch's own links a library
in its place under a file lock, and may be at it in a process without kcoord. Here it is linked elsewhere, and renamed.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.backends.backend import UNLOADED, Backend
from kcoord.errors import KeyFactorError
from kcoord.files.atomic import locked, replace_file
from kcoord.interruption import let_through
from kcoord.keys.device import DeviceKey, Scope
from kcoord.keys.host import cpu_features, host_abi
from kcoord.keys.tools import commands
from kcoord.rank.connect import connect

_FILE = "library.so"
"""Its name in the artifact."""
_LOCKED_FOR = 600  # seconds; torch's own bound
# attributes of a builder that name its inputs and outputs
_MOVED = ("_output_dir", "_target_file", "_output", "_sources_args")


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
        if not all(hasattr(builder, name) for builder in request.builders for name in _MOVED):
            return "this torch's builders differ"
        if last.get_target_file_path().endswith(".so") and not last._use_relative_path:
            return ""
        return "headers are compiled for one directory"

    def label(self, request: Build) -> str:
        return "cpp"  # torch's own name is a hash of paths, too

    def factors(self, request: Build) -> Mapping[str, Any]:
        """Torch's headers count by torch's release, as in torch's own keys."""
        import torch

        try:
            sources = [path.read_bytes() for path in request.sources]
        except OSError as error:  # torch reports a cache directory that is missing or another user's
            raise KeyFactorError(f"a source of it cannot be read: {error}") from None
        return {
            "sources": sources,
            "commands": list(_commands(request)),
            "torch": (str(torch.__version__), torch.version.git_version),
            "cpu": cpu_features(),  # -march=native
            "abi": host_abi(),  # a library that this host cannot open would end the job
        }

    def tools(self, request: Build) -> list[str]:
        return sorted({builder._compiler for builder in request.builders})

    def device(self, request: Build) -> DeviceKey | None:
        return None  # for the host; a worker must not initialize CUDA

    def compile(self, request: Build, staging: Path) -> Any:
        with tempfile.TemporaryDirectory(dir=staging) as directory:
            builders = _moved(_with_headers(request.builders), Path(directory))
            try:
                for builder in builders:
                    builder.build()
                built = builders[-1].get_target_file_path()
            except Exception as error:  # noqa: BLE001 - the directory's fault, perhaps: torch's own place tells
                let_through(error)
                _build(request)
                built = request.target
            shutil.copyfile(built, staging / _FILE)
        return UNLOADED

    def required(self, request: Build) -> tuple[str, ...]:
        return (_FILE,)

    def load(self, request: Build, artifact: Artifact) -> None:
        target = request.target
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(Path(request.lock), _LOCKED_FOR):
            if not target.exists():  # else another rank of this node has put it there
                replace_file(target, (artifact.path / _FILE).read_bytes())


backend = CppBackend()


class UncompiledHeader(str):
    """A header that torch would precompile before it looks for the library, on a node that builds nothing, too.

    It is empty, so that builders leave it out; ``_with_headers`` compiles it for those that build. `asked` is torch's call.
    """

    asked: tuple[tuple[Any, ...], dict[str, Any]]


def hook() -> None:
    """Replace torch's functions. Idempotent."""
    from torch._inductor import codecache

    build.__wrapped__ = _native()  # type: ignore[attr-defined]
    codecache._worker_compile_cpp = build
    precompile_later.__wrapped__ = _native_header()  # type: ignore[attr-defined]
    codecache._precompile_header = precompile_later


def precompile_later(header: str, hashable_cmd_line: str, *args: Any, **kwargs: Any) -> str:
    """As torch's ``_precompile_header``, and compiles nothing yet."""
    asked = (header, hashable_cmd_line, *args), kwargs
    if kwargs.get("aot_mode"):  # its libraries are built without `build`
        found: str = _native_header()(*asked[0], **kwargs)
        return found
    later = UncompiledHeader()
    later.asked = asked
    return later


def _native() -> Any:
    """Torch's function, also in a worker, where `build` replaces nothing."""
    from torch._inductor import codecache

    return getattr(build, "__wrapped__", codecache._worker_compile_cpp)


def _native_header() -> Any:
    from torch._inductor import codecache

    return getattr(precompile_later, "__wrapped__", codecache._precompile_header)


def _with_headers(builders: Sequence[Any]) -> list[Any]:
    """Copies of `builders` that read the headers precompiled, as torch's do: once on this node."""
    copies = [copy.copy(builder) for builder in builders]
    for each in copies:
        header = getattr(each._build_option, "precompiled_header", None)
        if isinstance(header, UncompiledHeader):
            args, kwargs = header.asked
            each._include_dirs_args = f"-include {_native_header()(*args, **kwargs)} {each._include_dirs_args}"
    return copies


def build(lock_path: str, cpp_builders: Sequence[Any], *args: Any, **kwargs: Any) -> None:
    """As torch's ``_worker_compile_cpp``. The file is not locked while another rank builds. No key holds other arguments."""
    request = Build(tuple(cpp_builders), lock_path)
    if args or kwargs:
        _native()(lock_path, cpp_builders, *args, **kwargs)
    elif not _is_there(request):
        backend.obtain(request, lambda: _build(request))


def _commands(request: Build) -> Iterator[str]:
    """The commands with the names of compilers, and with numbers for files: torch's names are hashes of paths, too."""
    from torch._inductor.codecache import cache_dir

    files = [*map(str, request.sources), *(builder.get_target_file_path() for builder in request.builders)]
    numbers = {name: f"{number}{Path(name).suffix}" for number, name in enumerate(dict.fromkeys(files))}
    for builder in request.builders:
        words = builder.get_command_line().removeprefix(builder._compiler).split()
        compiler = commands.name_of(builder._compiler, Path(), connect().settings.local_dir)
        line = " ".join([compiler, *(numbers.get(word, word) for word in words)])
        yield line.replace(cache_dir(), "CACHE")


def _is_there(request: Build) -> bool:
    """True once the library is complete."""
    from torch.utils._filelock import FileLock

    if not request.target.exists():
        return False
    with FileLock(request.lock, timeout=_LOCKED_FOR):
        return request.target.exists()


def _build(request: Build) -> None:
    """Build in torch's own place, as torch does."""
    _native()(request.lock, _with_headers(request.builders))


def _moved(builders: Sequence[Any], directory: Path) -> list[Any]:
    """Copies of `builders` that make their files in `directory`, and read there what others of them made."""
    made = {
        builder.get_target_file_path(): directory / Path(builder.get_target_file_path()).name for builder in builders
    }

    def moved(words: str) -> str:
        return " ".join(str(made.get(word, word)) for word in words.split())

    copies = [copy.copy(builder) for builder in builders]
    for each in copies:
        each._output_dir = str(directory)
        each._target_file, each._output, each._sources_args = map(
            moved, (each._target_file, each._output, each._sources_args)
        )
    return copies
