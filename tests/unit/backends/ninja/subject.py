"""Torch's extensions under the backend suite: C libraries that need no header of torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kcoord

kcoord.install()

import torch  # noqa: E402
from torch.utils import cpp_extension  # noqa: E402

from kcoord.testing import Subject, main  # noqa: E402

SOURCE = '#include "suffix.h"\nextern "C" const char *answer() { return "answer %d" SUFFIX FLAG; }\n'


class Extensions(Subject):
    def __init__(self) -> None:
        self.count, self.flag, self.suffix, self.text = 0, "", "", SOURCE
        self.pause: Callable[[], None] = lambda: None
        self.home = Path(os.environ["HOME"])
        self.includes = self.home / "include"
        native = cpp_extension._run_ninja_build

        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.count += 1
            self.pause()
            return native(*arguments, **keywords)

        cpp_extension._run_ninja_build = counted

    def written(self, path: Path, text: str) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(text)
            part.replace(path)
        return str(path)

    def build(self, number: int) -> bytes:
        if "CPATH" not in os.environ:
            self.written(self.includes / "suffix.h", f'#define SUFFIX "{self.suffix}"\n')
        source = self.written(self.home / f"answer{number}.cpp", self.text % number)
        flags = {"extra_cflags": [f'-DFLAG=\\"{self.flag}\\"'], "extra_include_paths": [str(self.includes)]}
        path = cpp_extension.load(f"answer{number}", [source], is_python_module=False, **flags)
        library = ctypes.CDLL(path)
        library.answer.restype = ctypes.c_char_p
        answer: bytes = library.answer()
        return answer

    def refuse(self) -> None:
        source = self.written(self.home / "refused.cpp", "int answer() { return no_such_name; }\n")
        cpp_extension.load("refused", [source], is_python_module=False)

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
            self.includes = self.home / "empty"
            other = self.written(self.home / "other" / "suffix.h", '#define SUFFIX "."\n')
            os.environ["CPATH"] = str(Path(other).parent)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Extensions)
