"""Two keys compared, in words: which definition of a file was edited.

The factor ``files`` of a key has the SHA-256 of each module's file. The detail ``definitions`` has, by module, what
`kcoord.keys.function.definitions.definitions_of` gave for the file's text; keys may lack it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from kcoord.keys.cache_key import CacheKey, Factor, FactorDiff

DIGITS = 12  # of a file's digest, for people
_FILES, _DEFINITIONS, _FIRST_LINE = "files", "definitions", "first line"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PLACED = re.compile(r"(\d{1,9}):(\w+)", re.ASCII)

_Definitions = dict[str, tuple[int, str]]
"""By name: line and digest."""


@dataclass(frozen=True)
class Worded(FactorDiff):
    """A difference as one line of text, in the place of ``ours → theirs``."""

    words: str = ""

    def __str__(self) -> str:
        return self.words


def diff(theirs: CacheKey, mine: CacheKey) -> list[FactorDiff]:
    """From `theirs` to `mine`, as `CacheKey.diff`: one difference for each file, with the first definition that was edited."""
    return [_of_file(d, theirs, mine) for d in _without_definitions(theirs).diff(_without_definitions(mine))]


def files_of(key: CacheKey) -> dict[str, str]:
    """The SHA-256 of each file in `key`, by module."""
    return {part.name: part.text for factor in key.factors if factor.name == _FILES for part in factor.parts}


def listed_factors(key: CacheKey) -> list[Factor]:
    """The factors and details of `key` for people, without its definitions, of which there may be thousands."""
    return [*key.factors, *_without_definitions(key).details]


def short_name(name: str) -> str:
    """The last part of a factor's name: ``BLOCK`` of ``constants BLOCK``."""
    return _FIRST_LINE if name.endswith(_FIRST_LINE) else name.rpartition(" ")[2]


def short_text(name: str, value: str) -> str:
    """A value of the factor `name`: of a file, the beginning of its digest."""
    return value[:DIGITS] if name.startswith(f"{_FILES} ") and _SHA256.fullmatch(value) else value


def _without_definitions(key: CacheKey) -> CacheKey:
    return replace(key, details=tuple(d for d in key.details if d.name != _DEFINITIONS))


def _of_file(difference: FactorDiff, theirs: CacheKey, mine: CacheKey) -> FactorDiff:
    name, before, now = difference.name, difference.ours, difference.theirs
    factor, _, module = name.partition(" ")
    if factor != _FILES or not module or not all(each is None or _SHA256.fullmatch(each) for each in (before, now)):
        return difference
    if before is None or now is None:
        edit = "was added" if before is None else "was removed"
    else:
        edit = _edit(_definitions(theirs, module), _definitions(mine, module))
    return Worded(name, before, now, f"file {module}: {edit}")


def _edit(before: _Definitions, now: _Definitions) -> str:
    if not before or not now:
        return "changed"
    edits = [(line, name, "changed" if name in before else "was added")
             for name, (line, digest) in now.items() if name not in before or before[name][1] != digest]  # fmt: skip
    edits += [(line, name, "was removed") for name, (line, _) in before.items() if name not in now]
    if edits:
        line, name, what = min(edits)
        return f"{name} {what} (line {line})"
    if sorted(before, key=before.__getitem__) != sorted(now, key=now.__getitem__):
        return "the order of its definitions changed"
    return "only comments or blank lines changed"


def _definitions(key: CacheKey, module: str) -> _Definitions:
    """Empty if the key does not have them, or has others than `definitions_of` makes: it may be a stranger's."""
    files = {part.name: part for detail in key.details if detail.name == _DEFINITIONS for part in detail.parts}
    parts = files[module].parts if module in files else ()
    placed = {part.name: _PLACED.fullmatch(part.text) for part in parts}
    found = {name: (int(match[1]), match[2]) for name, match in placed.items() if match}
    return found if len(found) == len(parts) else {}
