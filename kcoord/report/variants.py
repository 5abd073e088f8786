"""Variants of a kernel: the factors in which the keys of one name differ, so that people can tell them apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from kcoord.artifacts.manifest import Manifest
from kcoord.report.findings import Kernel
from kcoord.report.relatives import flat, is_digest, whole_key
from kcoord.report.tables import first_few
from kcoord.telemetry.spans import KEY_DIGITS, plain_text

OF_THE_CALL = frozenset(
    ("arguments", "attributes", "configs", "constants", "options", "signature", "tuning_key", "types")
)
"""Factors whose parts are named by the kernel's author or caller: constants, dtypes, options."""

_TARGET = "target"
_FEW = 4
_LONGEST_VALUE = 40  # characters

Variant = Mapping[str, str]
"""Factor by name, and its value: those in which a key differs from the others of its name, the call's own first."""


def variants_of(manifests: Iterable[Manifest]) -> dict[str, Variant]:
    """By digest, the variant of each key that is not the only one of its backend and name. Hashes are left out of it.

    Keys for several GPUs differ in their target, and not in the options that follow from it.
    """
    by_name: dict[tuple[str, str], dict[str, Manifest]] = defaultdict(dict)
    for manifest in manifests:
        by_name[manifest.key.backend, manifest.key.name][manifest.key.digest] = manifest
    found: dict[str, Variant] = {}
    for same in by_name.values():
        if len(same) > 1:
            found.update(zip(same, _told_apart(list(same.values())), strict=True))
    return found


def _told_apart(same: Sequence[Manifest]) -> list[Variant]:
    values = []
    for manifest in same:
        key = whole_key(manifest)
        values.append({name: factor.text for name, factor in flat((*key.factors, *key.details))})
    targets = [each.pop(_TARGET, "") for each in values]
    if len(set(targets)) == 1:
        return _differing(values)
    found: list[Variant] = [{}] * len(values)
    for target in set(targets):
        of_target = [number for number, each in enumerate(targets) if each == target]
        for number, variant in zip(of_target, _differing([values[number] for number in of_target]), strict=True):
            found[number] = {_TARGET: target, **variant}
    return found


def _differing(values: Sequence[dict[str, str]]) -> list[Variant]:
    names = {name for each in values for name in each}
    differing = [name for name in names if len({each.get(name) for each in values}) > 1]
    telling = [name for name in differing if not any(is_digest(each.get(name)) for each in values)]
    telling.sort(key=lambda name: (not _of_the_call(name), name))
    return [{name: each.get(name, "unset") for name in telling} for each in values]


def variant_text(variant: Variant) -> str:
    """``BLOCK=64, num_warps=4``; other factors than the call's with their whole names."""
    named = ((name.partition(" ")[2] or name if _of_the_call(name) else name, value) for name, value in variant.items())
    return plain_text(first_few([f"{name}={plain_text(value, _LONGEST_VALUE)}" for name, value in named], _FEW))


def tell_apart(kernels: Sequence[Kernel], manifests: Iterable[Manifest]) -> None:
    """Set the `variant` of each of a job's kernels."""
    keys = {kernel.key for kernel in kernels}
    found = variants_of(m for m in manifests if m.key.digest[:KEY_DIGITS] in keys)
    texts = {digest[:KEY_DIGITS]: variant_text(variant) for digest, variant in found.items()}
    for kernel in kernels:
        kernel.variant = texts.get(kernel.key, "")


def _of_the_call(name: str) -> bool:
    return name.partition(" ")[0] in OF_THE_CALL
