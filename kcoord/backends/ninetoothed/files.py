"""A library's files: those of an artifact, and those in the directory that the user named.

Users compile the C++ sources into programs of their own, so the directory has all that NineToothed would write there, but for the
libraries of a build's single kernels. Sources name a header in the user's home: an artifact holds a placeholder.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kcoord.backends.fail_open import notices
from kcoord.backends.ninetoothed.sources import read, write_whole
from kcoord.files.faults import store_error
from kcoord.interruption import let_through

_HEADER = b"@KCOORD_NINETOOTHED_H@"
_TEXT = (".cpp", ".h")
_CODE = "device-code.elf"
"""The header of a kernel's machine code, which names its GPU."""
_ELF = re.compile(rb"0x7f, 0x45, 0x4c, 0x46(?:, 0x[0-9a-f]{2}){60}")


def write_header(aot: Any) -> None:
    """Have the header that all sources include, whole. `aot` is NineToothed's module. Raises OSError."""
    aot._HEADER_PATH.parent.mkdir(exist_ok=True)
    write_whole(aot._HEADER_PATH, aot._HEADER_CONTENT.encode())


def collect(aot: Any, name: str, built: Path, staging: Path) -> None:
    """Copy the files of library `name` from the directory `built`. Raises OSError."""
    for file in sorted(built.iterdir()):
        content = file.read_bytes()
        if file.suffix in _TEXT:
            (staging / file.name).write_bytes(content.replace(str(aot._HEADER_PATH).encode(), _HEADER))
            if found := _ELF.search(content):
                (staging / _CODE).write_bytes(bytes(int(each, 16) for each in found[0].split(b", ")))
        elif file.name == f"{name}.so":
            (staging / file.name).write_bytes(content)


def install(aot: Any, name: str, directory: Path, output: Path) -> None:
    """Have the library's files in `output`, each one whole; the same ones are left alone.

    NineToothed's mark of what it built there goes with the library that it is of. A directory that takes no files is told of: the
    library works without.
    """
    try:
        write_header(aot)
        for file in sorted(directory.iterdir()):
            content = file.read_bytes()
            if file.suffix in _TEXT:
                content = content.replace(_HEADER, str(aot._HEADER_PATH).encode())
            elif file.suffix != ".so":
                continue
            elif read(output / file.name) != content:
                (output / f"{name}.fingerprint").unlink(missing_ok=True)
            write_whole(output / file.name, content)
    except OSError as error:
        let_through(error)
        notices.tell(f"{store_error(error, output)}; {name} is used without its files there")
