"""Compiles of host compilers and nvcc, for ``kcoord cc``, as a `Backend`. A handle is the compiler's exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.backends.backend import Backend
from kcoord.backends.cc.command import Command, Dependencies
from kcoord.files.atomic import replace_file
from kcoord.keys.device import DeviceKey
from kcoord.keys.host import cpu_features
from kcoord.keys.tools.commands import VARIABLES, Inputs

_OUTPUT, _MESSAGES = "output", "messages"


class CompilerFailed(Exception):
    """The compiler has refused, and said why on stderr. `status` is its exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the compiler's exit status is {status}")
        self.status = status


@dataclass(frozen=True)
class Compile:
    command: Command
    inputs: Inputs = field(repr=False)


class CompilerBackend(Backend[Compile, int]):
    """The leader compiles into the artifact's directory. All ranks, the leader too, copy the output to where it belongs."""

    name = "cc"
    variables = VARIABLES
    keeps_handles = False

    def bypass(self, request: Compile) -> str:
        return "its output may hold the time of the compile" if request.inputs.is_timed else ""

    def label(self, request: Compile) -> str:
        return Path(request.command.source).name

    def factors(self, request: Compile) -> Mapping[str, Any]:
        inputs = request.inputs
        return {
            "command": inputs.text,
            "files": inputs.files,
            "directory": str(Path.cwd()) if request.command.names_places else "",
            "cpu": cpu_features() if inputs.is_native else (),
        }

    def tools(self, request: Compile) -> Collection[str]:
        return request.inputs.tools

    def device(self, request: Compile) -> DeviceKey | None:
        return None

    def compile(self, request: Compile, staging: Path) -> int:
        """If the compiler succeeds without writing its output, nothing is published."""
        command, made = request.command, staging / _OUTPUT
        rule = () if command.dependencies is None else command.dependencies.flags
        done = subprocess.run([*command.canonical, *rule, "-o", str(made)], stderr=subprocess.PIPE)
        sys.stderr.buffer.write(done.stderr)
        if done.returncode:
            Path(command.output).unlink(missing_ok=True)
            raise CompilerFailed(status_of(done.returncode))
        if made.exists():
            _write(command.output, made.read_bytes())
        if done.stderr:
            (staging / _MESSAGES).write_bytes(done.stderr)
        return 0

    def required(self, request: Compile) -> tuple[str, ...]:
        return (_OUTPUT,)

    def unchanged(self, request: Compile) -> bool:
        return request.inputs.unchanged()

    def load(self, request: Compile, artifact: Artifact) -> int:
        command = request.command
        _write(command.output, (artifact.path / _OUTPUT).read_bytes())
        if command.dependencies is not None:
            _write(command.dependencies.file, _rule(command.dependencies, request.inputs.paths).encode())
        if (said := artifact.path / _MESSAGES).exists():
            sys.stderr.buffer.write(said.read_bytes())
        return 0


backend = CompilerBackend()


def status_of(returncode: int) -> int:
    """As a shell says it: 128 and more for a signal."""
    return returncode if returncode >= 0 else 128 - returncode


def _write(path: str, content: bytes) -> None:
    """Replace the file, with the permissions that a compiler gives it."""
    replace_file(Path(path), content)
    os.umask(mask := os.umask(0))
    Path(path).chmod(0o666 & ~mask)


def _rule(wanted: Dependencies, paths: Collection[str]) -> str:
    names = [path.replace("$", "$$").replace(" ", "\\ ") for path in dict.fromkeys(paths)]
    rules = [f"{' '.join(wanted.targets)}: " + " \\\n ".join(names)]
    return "\n".join(rules + [f"{name}:" for name in names[1:] if wanted.phony]) + "\n"
