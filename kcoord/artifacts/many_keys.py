"""Many keys of one kernel that differ in one argument: each of its values costs a compile, or a tuning."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kcoord.artifacts.manifest import Manifest
from kcoord.errors import ArtifactInvalid
from kcoord.keys.cache_key import Factor
from kcoord.telemetry.spans import plain_text
from kcoord.units import first_few

_LEAST = 7  # keys too many
_MOST_COMPARED = 500  # of one kernel; the first
_MOST_SHOWN, _LONGEST_VALUE = 3, 20
_OF_ARGUMENTS = ("arguments", "attributes", "constants", "signature", "tuning_key")
_TRITONS = ("attributes", "constants", "signature")  # one argument is in all of them

_DIGEST = re.compile(r"[0-9a-f]{40,}|[A-Z2-7]{52}")  # in hex, and in base32

_Value = dict[str, Factor]
"""Of an argument: each factor that tells of it."""


@dataclass
class ManyKeys:
    """`kernel` has `extra` keys, which took `seconds`, since `argument` has several `values`. `remedy`: what to do."""

    kernel: str
    argument: str
    values: list[str]
    extra: int
    seconds: float
    remedy: str

    def __str__(self) -> str:
        shown = first_few([plain_text(value, _LONGEST_VALUE) for value in self.values], _MOST_SHOWN)
        many = f"{self.argument} has {len(self.values)} values ({shown})"
        return f"{self.kernel}: {self.extra} compiles more, {self.seconds:.1f} s, since {many}; {self.remedy}"


def many_keys(manifests: Iterable[Manifest], least_seconds: float = 5.0) -> list[ManyKeys]:
    """Kernels with 8 keys or more that differ in one argument alone and took as long as that, the costliest first."""
    by_name: dict[tuple[str, str], list[Manifest]] = defaultdict(list)
    for manifest in manifests:
        by_name[manifest.key.backend, manifest.key.name].append(manifest)
    found = [_worst(each[:_MOST_COMPARED], least_seconds) for each in by_name.values() if len(each) > _LEAST]
    return sorted((each for each in found if each), key=lambda each: -each.seconds)


def _worst(manifests: list[Manifest], least_seconds: float) -> ManyKeys | None:
    """The argument that costs most, if it costs enough."""
    rows = [_row(manifest) for manifest in manifests]
    names = {name for row in rows for name in row}
    told = {name: [row.get(name, {}) for row in rows] for name in sorted(names)}
    varying = [name for name, values in told.items() if len(set(map(_digest, values))) > 1 and not _is_hash(values)]
    found = []
    for name in (name for name in varying if any(head in _OF_ARGUMENTS for value in told[name] for head in value)):
        alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for at in range(len(rows)):
            alike[tuple(_digest(told[other][at]) for other in varying if other != name)].append(at)
        extra = sum(len(group) - 1 for group in alike.values())
        seconds = sum(manifests[at].compile_seconds for group in alike.values() for at in group[1:])
        if extra >= _LEAST and seconds >= least_seconds:
            values = [told[name][at] for group in alike.values() if len(group) > 1 for at in group]
            found.append(_many(plain_text(manifests[0].key.name), name, values, extra, seconds))
    return max((each for each in found if each), key=lambda each: each.extra, default=None)


def _many(kernel: str, name: str, told: list[_Value], extra: int, seconds: float) -> ManyKeys | None:
    argument, signatures = plain_text(name.rpartition(" ")[2]), {_of(value, "signature") for value in told}
    values = sorted({_text(value) for value in told}, key=lambda text: (len(text), text))
    if argument == "tuning_key":
        argument = "its tuning key"
        remedy = "round it up, or leave it out of the key of triton.autotune"
    elif signatures == {"constexpr"}:
        if sum(text.isdecimal() and int(text).bit_count() != 1 for text in values) <= _LEAST:
            return None  # an autotuner's configurations, which are powers of two
        remedy = "round it up, or pass it as an argument that is no tl.constexpr"
    elif signatures == {""}:
        remedy = "round it up, or pass it as the kernel is launched"
    elif len(types := [each for each in signatures if each and each != "constexpr"]) != 1 or types[0][0] == "*":
        return None  # of several types, which one kernel cannot have; or a pointer, whose alignment matters
    else:
        remedy = f'triton.jit(do_not_specialize=["{argument}"]), unless 1 and multiples of 16 need faster code'
    return ManyKeys(kernel, argument, values, extra, seconds, remedy)


def _is_hash(values: list[_Value]) -> bool:
    """True for a compiler's own hash of the rest."""
    texts = [factor.text for value in values for factor in value.values()]
    return len(set(texts)) == len(values) and all(map(is_digest, texts))


def _text(value: _Value) -> str:
    """A value for people; of a number that is no constant, what Triton specialized on."""
    if "constants" in value:
        return value["constants"].text
    if "signature" in value:
        return "multiples of 16" if "divisibility" in _of(value, "attributes") else "others"
    return next((factor.text for factor in value.values()), "unset")


def _of(value: _Value, factor: str) -> str:
    return value[factor].text if factor in value else ""


def _digest(value: _Value) -> str:
    return " ".join(factor.digest for factor in value.values())


def _row(manifest: Manifest) -> dict[str, _Value]:
    """The key's factors, by argument."""
    try:
        key = manifest.explained
    except ArtifactInvalid:
        key = manifest.key
    row: dict[str, _Value] = defaultdict(dict)
    for factor in (*key.factors, *key.details):
        for name, leaf in _leaves(factor):
            head, _, argument = name.partition(" ")
            if head not in _TRITONS:
                row[name][head] = leaf
            elif argument:  # else it says that there are none
                row[argument][head] = leaf
    return dict(row)


def _leaves(factor: Factor, above: str = "") -> Iterator[tuple[str, Factor]]:
    name = f"{above}{factor.name}"
    if not factor.parts:
        yield name, factor
    for part in factor.parts:
        yield from _leaves(part, f"{name} ")


def is_digest(text: str | None) -> bool:
    """True for a value that tells people nothing."""
    return text is not None and _DIGEST.fullmatch(text) is not None
