"""Versions of symbols that an ELF file needs of other libraries, and those that it defines.

Read from the sections ``.gnu.version_r`` and ``.gnu.version_d``, as the Linux Standard Base lays them out ("Symbol Versioning").
Only programs and shared libraries of 64 bits, little-endian, have any. Files that are damaged have none, or some.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from itertools import islice
from typing import BinaryIO, TypeVar

from kcoord.interruption import let_through

T = TypeVar("T")

Read = Callable[[int, int], bytes]
"""``read(offset, size)``: bytes of a file, fewer at its end. May raise OSError."""

_HEADER = struct.Struct("<4sBB10xHH20xQ10xHH2x")  # magic, class, data, type, machine, the sections' offset, size, count
_SECTION = struct.Struct("<4xI16xQQI20x")  # type, offset, size, link to its names
_NEEDED, _DEFINED = 0x6FFFFFFE, 0x6FFFFFFD  # types of sections
_LIBRARY = struct.Struct("<2xHIII")  # count of versions, name, offset of the first version, of the next library
_VERSION = struct.Struct("<4xH2xII")  # flags, name, offset of the next one
_DEFINITION = struct.Struct("<12xII")  # offset of its name, of the next one
_NAME = struct.Struct("<I4x")
_WEAK = 2  # the dynamic linker only warns of a version that is missing
_LARGEST_SECTION = 256 << 10  # bytes
_LONGEST_NAME = 128  # bytes
_MOST_SECTIONS = 4096
_MOST_VERSIONS = 1000
_DAMAGED = (OSError, OverflowError, ValueError, IndexError, struct.error)


def of_bytes(content: bytes) -> Read:
    return lambda offset, size: content[offset : offset + size]


def of_file(file: BinaryIO) -> Read:
    return lambda offset, size: os.pread(file.fileno(), size, offset)


def machine_of(read: Read) -> int:
    """The number in ELF of the processor that a program or a shared library is for; 0 for any other file."""
    return _header(read)[0]


def needed(read: Read) -> set[tuple[str, str]]:
    """Pairs of a library's name and of a version that this library must define."""
    found = islice(_versions(read, _NEEDED, _in_needs), _MOST_VERSIONS)
    return {(library, version) for library, version, flags in found if not flags & _WEAK}


def defined(read: Read) -> set[str]:
    return set(islice(_versions(read, _DEFINED, _in_definitions), _MOST_VERSIONS))


def _header(read: Read) -> tuple[int, int, int]:
    """The machine, and the offset and the number of sections."""
    try:
        magic, width, order, kind, machine, start, size, count = _HEADER.unpack(read(0, _HEADER.size))
    except _DAMAGED as error:
        let_through(error)
        return 0, 0, 0
    known = (magic, width, order, size) == (b"\x7fELF", 2, 1, _SECTION.size) and kind in (2, 3)
    return (machine, start, min(count, _MOST_SECTIONS)) if known else (0, 0, 0)


def _versions(read: Read, wanted: int, walk: Callable[[bytes, Callable[[int], str]], Iterator[T]]) -> Iterator[T]:
    _, start, count = _header(read)
    try:
        sections = list(_SECTION.iter_unpack(read(start, count * _SECTION.size)))
        for kind, offset, size, link in sections:
            if kind == wanted:
                names = sections[link][1]

                def text(at: int, names: int = names) -> str:
                    return read(names + at, _LONGEST_NAME).partition(b"\0")[0].decode("ascii")

                yield from walk(read(offset, min(size, _LARGEST_SECTION)), text)
                return  # a file has one
    except _DAMAGED as error:
        let_through(error)


def _in_needs(section: bytes, text: Callable[[int], str]) -> Iterator[tuple[str, str, int]]:
    at, step = 0, 1
    while step:
        count, library, first, step = _LIBRARY.unpack_from(section, at)
        place = at + first
        for _ in range(count):
            flags, name, further = _VERSION.unpack_from(section, place)
            yield text(library), text(name), flags
            place += further
        at += step


def _in_definitions(section: bytes, text: Callable[[int], str]) -> Iterator[str]:
    at, step = 0, 1
    while step:
        first, step = _DEFINITION.unpack_from(section, at)
        (name,) = _NAME.unpack_from(section, at + first)
        yield text(name)
        at += step
