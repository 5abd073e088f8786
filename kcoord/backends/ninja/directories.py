"""FlashInfer's and tvm_ffi's builds, as requests.

They write a ninja file, run ninja in a directory that ranks may share, and load a library. It is put where the builder expects
it, whole, and only if it differs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcoord.backends.fail_open import coordinator_in_use, fails_open
from kcoord.backends.ninja.request import Library, inputs_of, put
from kcoord.keys.packages import identity_of

Ninja = Callable[[Path, Path], None]
"""Runs a ninja file: the directory to run in, and the file."""
NAME = "build.ninja"
_NOT_SHARED = ("embed_cubin", "subninja")
"""Marks of ninja files that do more than compile, or build several libraries."""


@dataclass(frozen=True)
class Directory(Library):
    """`text` is the ninja file. `moved`: its outputs lie in this directory by name. `target` is where the library belongs."""

    package: str
    text: str = field(repr=False)
    moved: Path | None
    target: Path
    ninja: Ninja = field(repr=False)

    def build(self, directory: Path) -> None:
        text = self.text.replace(str(self.moved), str(directory)) if self.moved else self.text
        (directory / NAME).write_text(text)
        self.ninja(directory, directory / NAME)

    def load(self, directory: Path) -> None:
        put(directory / self.file, self.target)

    def factors(self) -> Mapping[str, Any]:
        return {"package": identity_of(self.package)}


@fails_open(lambda *arguments: None)
def request_of(package: str, workdir: Path, file: Path, ninja: Ninja) -> Directory | None:
    """The request of this run of ninja; None if it runs without kcoord."""
    coordinator = coordinator_in_use()
    if coordinator is None:
        return None
    text, place = file.read_text(), file.parent
    if any(each in text for each in _NOT_SHARED):
        return None
    try:
        inputs, output = inputs_of(file, workdir, coordinator.settings.local_dir)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None  # ninja reports it itself
    target, is_absolute = workdir / output, Path(output).is_absolute()
    would_move = is_absolute and any(Path(path).is_relative_to(place) for path in inputs.paths)
    if target.parent != (place if is_absolute else workdir) or would_move:
        return None
    return Directory(target.stem, target.name, inputs, package, text, place if is_absolute else None, target, ninja)
