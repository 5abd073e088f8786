"""``kcoord cc`` under the backend suite: g++, and sources and outputs in a directory of each process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kcoord.backends.cc import adapter
from kcoord.backends.cc.launcher import run
from kcoord.testing import Subject, main

SOURCE = '#include "suffix.h"\nextern const char *answer;\nconst char *answer = "answer %d" SUFFIX FLAG;\n'


class Compiler(Subject):
    def __init__(self) -> None:
        self.count, self.flag, self.suffix, self.text = 0, "", "", SOURCE
        self.pause: Callable[[], None] = lambda: None
        self.home = Path(os.environ["HOME"], str(os.getpid()))
        (self.home / "include").mkdir(parents=True)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.count += 1
            self.pause()
            return subprocess.run(*arguments, **keywords)

        vars(adapter)["subprocess"] = SimpleNamespace(run=counted, PIPE=subprocess.PIPE)

    def build(self, number: int) -> bytes:
        (self.home / "include" / "suffix.h").write_text(f'#define SUFFIX "{self.suffix}"\n')
        return self.compiled(f"answer{number}.cpp", self.text % number)

    def compiled(self, name: str, text: str) -> bytes:
        source, output = self.home / name, self.home / "out.o"
        source.write_text(text)
        output.unlink(missing_ok=True)
        include = [] if "CPATH" in os.environ else [f"-I{self.home / 'include'}"]
        line = ["g++", "-c", str(source), f'-DFLAG="{self.flag}"', *include, "-o", str(output)]
        stock = "KCOORD_DISABLE" in os.environ  # the launcher would put the compiler in this process's place
        if subprocess.run(line).returncode if stock else run(line):
            raise RuntimeError("refused")
        return output.read_bytes()

    def refuse(self) -> None:
        self.compiled("refused.cpp", "int answer() { return no_such_name; }\n")

    def compiles(self) -> int:
        return self.count

    def before_each_compile(self, pause: Callable[[], None]) -> None:
        self.pause = pause

    def change(self, name: str) -> None:
        if name == "a source":
            self.text = SOURCE.replace("answer %d", "Answer %d")
        elif name == "a header":
            self.suffix = "!"
        elif name == "a flag":
            self.flag = "?"
        else:
            other = self.home / "other"
            other.mkdir()
            (other / "suffix.h").write_text('#define SUFFIX "."\n')
            os.environ["CPATH"] = str(other)


if __name__ == "__main__":
    main(Compiler)
