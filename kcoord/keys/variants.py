"""Variants of a kernel: the factors in which the keys of one name differ, so that people can tell them apart."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kcoord.keys.cache_key import CacheKey, Factor

OF_THE_CALL = frozenset(
    ("arguments", "attributes", "configs", "constants", "options", "signature", "tuning_key", "types")
)
"""Factors whose parts are named by the kernel's author or caller: constants, dtypes, options."""

Variant = Mapping[str, str]
"""Factor by name, and its value: those in which a key differs from the others of its name, the call's own first."""

_DIGEST = re.compile(r"[0-9a-f]{40,}|[A-Z2-7]{52}")  # in hex, and in base32
_MOST_PARTS = 64  # of one call
_LONGEST = 64  # characters of a part's name, and of its value
_TARGET = "target"


def told_apart(values: Sequence[Mapping[str, str]]) -> list[Variant]:
    """The variant of each key of one name, without hashes. `values`: factor by name, and its text.

    Keys for several GPUs differ in their target, and not in the options that follow from it.
    """
    targets = [each.get(_TARGET, "") for each in values]
    values = [{name: text for name, text in each.items() if name != _TARGET} for each in values]
    if len(set(targets)) == 1:
        return _differing(values)
    found: list[Variant] = [{}] * len(values)
    for target in set(targets):
        of_target = [number for number, each in enumerate(targets) if each == target]
        for number, variant in zip(of_target, _differing([values[number] for number in of_target]), strict=True):
            found[number] = {_TARGET: target, **variant}
    return found


def call_text(key: CacheKey) -> str:
    """The factors of the call and the target, as they travel with a claim: a few hundred characters, in microseconds."""
    lines = []
    for factor in (*key.factors, *key.details):
        if factor.name in OF_THE_CALL:
            lines += [
                f"{factor.name} {part.name[:_LONGEST]}\t{part.text[:_LONGEST]}" for part in factor.parts[:_MOST_PARTS]
            ]
        elif factor.name == _TARGET:
            lines.append(f"{_TARGET}\t{factor.text}")
    return "\n".join(lines[:_MOST_PARTS])


def call_of(text: str) -> dict[str, str]:
    """Factor by name, and its text, of `call_text` as a rank sent it. Lines that are none are left out."""
    lines = (line.partition("\t") for line in text.split("\n")[:_MOST_PARTS])
    return {name: value for name, tab, value in lines if tab}


def _differing(values: Sequence[Mapping[str, str]]) -> list[Variant]:
    names = {name for each in values for name in each}
    unequal = [name for name in names if len({each.get(name) for each in values}) > 1]
    telling = [name for name in unequal if not any(is_digest(each.get(name)) for each in values)]
    telling.sort(key=lambda name: (not is_of_the_call(name), name))
    return [{name: each.get(name, "unset") for name in telling} for each in values]


def is_of_the_call(name: str) -> bool:
    """True for the full name of a factor, such as ``constants BLOCK``, that the kernel's author or caller named."""
    return name.partition(" ")[0] in OF_THE_CALL


def is_digest(text: str | None) -> bool:
    """True if a factor's text is a hash, which tells people nothing."""
    return text is not None and _DIGEST.fullmatch(text) is not None


def flat(factors: Iterable[Factor], prefix: str = "") -> Iterator[tuple[str, Factor]]:
    """The factors that have no parts, by their full names: ``options num_warps``."""
    for factor in factors:
        if factor.parts:
            yield from flat(factor.parts, f"{prefix}{factor.name} ")
        else:
            yield prefix + factor.name, factor
