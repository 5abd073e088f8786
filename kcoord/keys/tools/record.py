"""A toolchain as it is written down: the compilers of a machine by content, and their answers to the questions of frameworks.

A machine without compilers *borrows* it: in place of each compiler it has a stub, a script that gives the recorded answers and
compiles nothing. The stub's text names the contents that count in keys, so keys are those of the machine that has the compiler.
A stub counts so only where nobody but this user and root could have written it.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kcoord.files.atomic import replace_file
from kcoord.keys.cache_key import CacheKey
from kcoord.ownership import doubt_of, finding_of

BACKEND = "toolchain"
"""Of a record's key."""
ROLES = {
    "C": ("cc", "gcc", "clang"),
    "C++": ("c++", "g++", "clang++"),
    "CUDA": ("nvcc",),
    "linker": ("ld", "ld.lld"),
}
"""Names of programs that do the same work. A stub of one may hide another that works."""
_QUESTIONS = ("--version", "-v", "-dumpversion", "-dumpfullversion", "-dumpfullversion -dumpversion", "-dumpmachine")
_PLACES = re.compile(r"(?m)^(?:COLLECT_(?!GCC=)|Configured with:|InstalledDir:|(?:Found|Selected) ).*\n")
_RELEASE = re.compile(r"\b(\d+(?:\.\d+)+)\b")
_ANSWERS = 20.0  # seconds
_MARK = "# a borrowed compiler of kcoord's: "
_CODE = """
import json, sys
with open(__file__) as file:
    stub = json.loads(file.read().splitlines()[1].partition(": ")[2])
missing = ["", f"{stub['name']} is borrowed (KCOORD_TOOLCHAIN) and compiles nothing: kcoord: {stub['digest'][:12]}\\n", 127]
out, err, status = stub["answers"].get(" ".join(sys.argv[1:]), missing)
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(status)
"""


@dataclass(frozen=True)
class Toolchain:
    """`tools`: by a compiler's name, the SHA-256 of it and of what it runs, by label. `answers`: stdout, stderr and status, by
    name and arguments.
    """

    system: str
    machine: str
    tools: Mapping[str, Mapping[str, str]]
    answers: Mapping[str, Mapping[str, list[Any]]]

    @property
    def key(self) -> CacheKey:
        """Its digest is that of the toolchain: equal contents have one, wherever they lie."""
        return CacheKey.of(BACKEND, f"{self.system} {self.machine}", tools=self.tools)

    @property
    def releases(self) -> dict[str, str]:
        """By the compiler's name, as it states it."""
        found = {}
        for name, answers in self.answers.items():
            said = [answers[each][0] for each in ("-dumpfullversion", "--version") if answers[each][2] == 0]
            found[name] = next((each[0] for each in map(_RELEASE.findall, said) if each), "?")
        return found

    def asked(self) -> Toolchain:
        """This machine's compilers with their answers."""
        return replace(self, answers={name: {each: _answer(name, each) for each in _QUESTIONS} for name in self.tools})

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, content: bytes, digest: str = "") -> Toolchain:
        """Raises ValueError unless `content` is a record, and that of `digest` if one is given."""
        try:
            found = cls(**json.loads(content))
            if digest and found.key.digest != digest:
                raise ValueError("it is another toolchain's")
            for name, tools in found.tools.items():
                if "/" in name or name[:1] == "." or tools.keys() != {str(label) for label in tools}:
                    raise ValueError(f"{name!r} is no compiler's name")
            if found.releases.keys() != found.tools.keys():  # also: its answers are well-formed
                raise ValueError("it has not the answers of all its compilers")
        except (TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(f"it is no record of a toolchain: {error}") from None
        return found


def observed(walk: Callable[[str], Mapping[str, str]]) -> Toolchain:
    """The compilers on ``PATH``, not asked yet, and none that is borrowed. ``walk(path)`` is the content of one, by label."""
    found = {
        name: path for names in ROLES.values() for name in names if (path := shutil.which(name)) and not read(path)
    }
    tools = {name: dict(walk(path)) for name, path in found.items()}
    return Toolchain(platform.system(), platform.machine(), tools, {})


def _answer(name: str, question: str) -> list[Any]:
    command, environ = [name, *question.split()], {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=environ,
            timeout=_ANSWERS,
        )
    except (OSError, subprocess.SubprocessError):
        return ["", "", 127]
    return [_PLACES.sub("", done.stdout), _PLACES.sub("", done.stderr), done.returncode]


def missing_roles(path: str | None = None) -> list[str]:
    """Those of which no program is on `path`, by default ``PATH``."""
    return [role for role, names in ROLES.items() if not any(shutil.which(name, path=path) for name in names)]


def write_stubs(directory: Path, toolchain: Toolchain, roles: Iterable[str]) -> list[str]:
    """Write the stubs of `roles` into `directory`; returns their names. Raises OSError."""
    names = [name for role in roles for name in ROLES[role] if name in toolchain.tools]
    for name in names:
        stub = {
            "digest": toolchain.key.digest,
            "name": name,
            "tools": toolchain.tools[name],
            "answers": toolchain.answers[name],
        }
        text = f"#!{sys.executable} -IS\n{_MARK}{json.dumps(stub)}\n{_CODE}"
        replace_file(directory / name, text.encode())
        (directory / name).chmod(0o755)
    return names


def read(path: str) -> Mapping[str, str] | None:
    """The contents, by label, of the compiler that the stub at `path` stands for.

    None if it is no stub, or one that others may have written.
    """
    try:
        with Path(path).open("rb") as file:
            if file.read(2) != b"#!" or not file.readline() or file.read(len(_MARK)) != _MARK.encode():
                return None
            found = os.fstat(file.fileno())
            if finding_of(path, found) or _doubt(os.path.dirname(path)):  # noqa: PTH120
                return None
            return dict(json.loads(file.readline())["tools"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


@functools.lru_cache(maxsize=64)
def _doubt(directory: str) -> str:
    return doubt_of(directory)
