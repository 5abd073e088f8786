"""Extensions that ``torch.utils.cpp_extension``'s ``load`` and ``load_inline`` build, as requests."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcoord.backends.fail_open import coordinator_in_use, fails_open
from kcoord.backends.ninja.request import Library, inputs_of, put
from kcoord.interruption import let_through
from kcoord.keys.tools.commands import Inputs

LISTS = ("extra_cflags", "extra_cuda_cflags", "extra_sycl_cflags", "extra_ldflags", "extra_include_paths")
_GENERATED = 3600.0  # seconds after a source was written during which each rank may write it again
_ABOVE = re.compile(rb'include\s*"\.\./')

loaded: dict[str, tuple[tuple[str, ...], Path]] = {}
"""Extensions that this process has loaded: the digests of their sources and headers, and the directory. An unchanged one is not
loaded from another directory: its operators would be registered twice, which ends the process."""


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

        arguments = {**self.arguments, "sources": list(self._copies(directory)), "build_directory": str(directory)}
        cpp_extension._write_ninja_file_and_build_library(**arguments)

    def _copies(self, directory: Path) -> Iterator[str]:
        """The sources, or copies of those that this job has just generated: each of its ranks may write them again, in place,
        while the compiler reads them.
        """
        self.copied.clear()
        digests = {file.path: file.digest for file in self.inputs.read}
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
        """The content of a source that was written recently; None for an older one, or if it may include a file beside it."""
        headers = set(self.inputs.paths) - set(self.arguments["sources"])
        try:
            is_old = time.time() - source.stat().st_mtime > _GENERATED
            if is_old or any(Path(header).is_relative_to(source.parent) for header in headers):
                return None
            content = source.read_bytes()
        except OSError:
            return None  # the compiler reports it itself
        return None if _ABOVE.search(content) else content

    def unchanged(self) -> bool:
        return self.inputs.unchanged(self.copied)

    def load(self, directory: Path) -> Any:
        """Put the library into torch's own directory, where other programs look for it, and load it from there.

        From `directory` if torch's takes no files, or if this process has loaded another one of that name: Python knows a
        library by its path.
        """
        try:
            put(directory / self.file, self.place / self.file)
        except OSError as error:
            let_through(error)
            return self.load_from(directory)
        return self.load_from(directory if self.name in loaded else self.place)

    def load_from(self, directory: Path) -> Any:
        from torch.utils import cpp_extension

        loaded[self.name] = self.inputs.files, directory
        return cpp_extension._import_module_from_library(self.name, str(directory), self.is_python_module)

    def factors(self) -> Mapping[str, Any]:
        import torch

        return {"module": self.is_python_module, "torch": (str(torch.__version__), torch.version.git_version)}


@fails_open(lambda arguments: None)
def request_of(arguments: Mapping[str, Any]) -> Extension | None:
    """The request of a call of `_jit_compile`; None if torch builds this extension without kcoord."""
    from torch.utils import cpp_extension as torchs

    coordinator = coordinator_in_use()
    if coordinator is None or arguments["is_standalone"] or torchs.IS_HIP_EXTENSION or arguments["with_sycl"]:
        return None
    sources = [str(Path(source).absolute()) for source in arguments["sources"]]
    lists = {name: list(arguments.get(name) or ()) for name in LISTS}
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
        return None  # torch reports it itself
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
    """The inputs of the build that torch would run in `place`."""
    with tempfile.TemporaryDirectory(prefix="kcoord-ninja-") as directory:
        flags = torchs._prepare_ldflags(list(asked["extra_ldflags"]), asked["with_cuda"], False, False, False)
        file = Path(directory, "build.ninja")
        wanted = {name: value for name, value in asked.items() if name != "verbose"}
        torchs._write_ninja_file_to_build_library(**{**wanted, "path": str(file), "extra_ldflags": flags})
        return inputs_of(file, place, local_dir)[0]
