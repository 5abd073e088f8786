"""``torch.utils.cpp_extension``'s ``load`` and ``load_inline``: ``_jit_compile``, below them, is answered by the backend."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcoord.backends.fail_open import coordinator_in_use, fails_open, notices
from kcoord.backends.ninja.backend import Library
from kcoord.backends.ninja.inputs import inputs_of
from kcoord.backends.wrapping import is_wrapped, wraps
from kcoord.files.atomic import replace_file
from kcoord.keys.tools.commands import Inputs

if TYPE_CHECKING:
    from kcoord.backends.ninja.backend import NinjaBackend

_NEEDED = ("JIT_EXTENSION_VERSIONER", "_write_ninja_file_and_build_library", "_write_ninja_file_to_build_library",
           "_import_module_from_library", "_prepare_ldflags", "_maybe_write", "LIB_EXT")  # fmt: skip
_LISTS = ("extra_cflags", "extra_cuda_cflags", "extra_sycl_cflags", "extra_ldflags", "extra_include_paths")
_PARAMETERS = {
    "name", "sources", *_LISTS, "build_directory", "verbose", "with_cuda", "with_sycl", "is_python_module",
    "is_standalone", "keep_intermediates",
}  # fmt: skip
_GENERATED = 3600.0  # seconds since a source was written for which a job may write it again and again
_ABOVE = re.compile(rb'include\s*"\.\./')

_loaded: dict[str, tuple[tuple[str, ...], Path]] = {}
"""Of each extension in this process, the digests of its sources and headers, and where it is from. One whose files have not
changed is not loaded from another place: the operators that it registers would be registered again, which ends the process."""


@dataclass(frozen=True)
class Extension(Library):
    """`name` has the version that torch gives an extension which changes in mid-process.

    `arguments` are torch's, for its functions that write the ninja file and build; `place` is its directory for them. `copied`
    are the sources of which the last build read copies.
    """

    is_python_module: bool
    place: Path
    arguments: Mapping[str, Any] = field(repr=False)
    copied: set[str] = field(default_factory=set, compare=False, repr=False)

    def build(self, directory: Path) -> None:
        from torch.utils import cpp_extension

        build = cpp_extension._write_ninja_file_and_build_library
        sources = list(self._copies(directory))
        arguments = {**self.arguments, "sources": sources, "build_directory": str(directory)}
        build(**{name: value for name, value in arguments.items() if name in inspect.signature(build).parameters})

    def _copies(self, directory: Path) -> Iterator[str]:
        """The sources, or copies of those that this job has just generated: each of its ranks may write them again, in place,
        while the compiler reads them.
        """
        self.copied.clear()
        digests = dict(zip(self.inputs.paths, self.inputs.digests, strict=True))
        for source in self.arguments["sources"]:
            content = self._generated(Path(source))
            if content is None or hashlib.sha256(content).hexdigest() != digests.get(source):
                yield source
                continue
            copy = directory / "sources" / Path(source).name
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(content)
            self.copied.add(source)
            yield str(copy)

    def _generated(self, source: Path) -> bytes | None:
        """The content of a source that was just written; None for another one, and if it may include a file beside it."""
        headers = set(self.inputs.paths) - set(self.arguments["sources"])
        try:
            is_old = time.time() - source.stat().st_mtime > _GENERATED
            if is_old or any(Path(header).is_relative_to(source.parent) for header in headers):
                return None
            content = source.read_bytes()
        except OSError:
            return None  # the compiler says it in words of its own
        return None if _ABOVE.search(content) else content

    def unchanged(self) -> bool:
        return self.inputs.unchanged(self.copied)

    def load(self, directory: Path) -> Any:
        from torch.utils import cpp_extension

        _loaded[self.name] = self.inputs.files, directory
        return cpp_extension._import_module_from_library(self.name, str(directory), self.is_python_module)

    def factors(self) -> Mapping[str, Any]:
        import torch

        return {"module": self.is_python_module, "torch": (str(torch.__version__), torch.version.git_version)}


@fails_open(lambda backend: None)
def hook(backend: NinjaBackend) -> None:
    """Idempotent."""
    from torch.utils import cpp_extension

    native = cpp_extension._jit_compile
    if is_wrapped(native):
        return
    signature = inspect.signature(native)
    missing = [name for name in _NEEDED if not hasattr(cpp_extension, name)]
    missing += sorted(set(signature.parameters) - _PARAMETERS)
    if missing:
        notices.tell(f"this torch's cpp_extension differs in {missing[0]}: extensions are built by each rank")
        return

    @wraps(native)
    def jit_compile(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        with _versions(cpp_extension.JIT_EXTENSION_VERSIONER, given.arguments["name"]) as back:

            def compile() -> Any:
                back()
                return native(*args, **kwargs)

            request = request_of(given.arguments)
            if request is None:
                return compile()
            files, place = _loaded.get(request.name, ((), request.place))
            if files == request.inputs.files and (place / request.file).exists():
                return request.load(place)
            return backend.obtain(request, functools.partial(_from, request, compile))

    cpp_extension._jit_compile = jit_compile
    cpp_extension._maybe_write = _maybe_write


def _from(request: Extension, compile: Callable[[], Any]) -> Any:
    """Torch's own, which is in its own directory."""
    made = compile()
    _loaded[request.name] = request.inputs.files, request.place
    return made


@contextmanager
def _versions(versioner: Any, name: str) -> Iterator[Callable[[], None]]:
    """A block in which the extension `name` may get its next version; the function that it is given takes that back."""
    before = versioner.entries.get(name)

    def back() -> None:
        versioner.entries.pop(name, None)
        if before is not None:
            versioner.entries[name] = before

    yield back


def _maybe_write(filename: str, new_content: str) -> None:
    """As torch's: ``load_inline``'s sources. Ranks that share the directory read the whole file or none."""
    path = Path(filename)
    if not path.exists() or path.read_text() != new_content:
        replace_file(path, new_content.encode())


@fails_open(lambda arguments: None)
def request_of(arguments: Mapping[str, Any]) -> Extension | None:
    """Of `_jit_compile`'s arguments. None for an extension that torch is left to build."""
    from torch.utils import cpp_extension as torchs

    coordinator = coordinator_in_use()
    if coordinator is None or arguments["is_standalone"] or torchs.IS_HIP_EXTENSION or arguments.get("with_sycl"):
        return None
    sources = [str(Path(source).absolute()) for source in arguments["sources"]]
    lists = {name: list(arguments.get(name) or ()) for name in _LISTS}
    with_cuda = arguments["with_cuda"]
    if with_cuda is None:
        with_cuda = any(map(torchs._is_cuda_file, sources))
    if any(source.endswith(".sycl") for source in sources):
        return None
    try:
        name = _versioned(torchs.JIT_EXTENSION_VERSIONER, arguments, with_cuda)
        asked = {
            **lists, "name": name, "sources": sources, "verbose": arguments["verbose"], "with_cuda": with_cuda,
            "with_sycl": False, "is_standalone": False,
        }  # fmt: skip
        place = Path(arguments["build_directory"]).absolute()
        inputs = _inputs(torchs, asked, place, coordinator.settings.local_dir)
    except (OSError, subprocess.SubprocessError, RuntimeError, ValueError):
        return None  # torch raises it in words of its own
    return Extension(name, f"{name}{torchs.LIB_EXT}", inputs, arguments["is_python_module"], place, asked)


def _versioned(versioner: Any, arguments: Mapping[str, Any], with_cuda: bool) -> str:
    """The extension's name, as torch makes it for one that has changed since this process loaded it."""
    version = versioner.bump_version_if_changed(
        arguments["name"],
        arguments["sources"],
        build_arguments=[
            arguments[n] for n in ("extra_cflags", "extra_cuda_cflags", "extra_ldflags", "extra_include_paths")
        ],
        build_directory=arguments["build_directory"],
        with_cuda=with_cuda,
        with_sycl=False,
        is_python_module=arguments["is_python_module"],
        is_standalone=False,
    )
    return f"{arguments['name']}_v{version}" if version else str(arguments["name"])


def _inputs(torchs: Any, asked: dict[str, Any], place: Path, local_dir: Path) -> Inputs:
    """Torch runs ninja in `place`."""
    with tempfile.TemporaryDirectory(prefix="kcoord-ninja-") as directory:
        flags = torchs._prepare_ldflags(list(asked["extra_ldflags"]), asked["with_cuda"], False, False, False)
        write = torchs._write_ninja_file_to_build_library
        wanted = {**asked, "path": str(Path(directory, "build.ninja")), "extra_ldflags": flags}
        write(**{name: value for name, value in wanted.items() if name in inspect.signature(write).parameters})
        return inputs_of(Path(directory, "build.ninja"), place, local_dir)[0]
