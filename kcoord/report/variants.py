"""The variants of artifacts, and the text that tells one from the others of its name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from kcoord.artifacts.manifest import Manifest
from kcoord.keys.variants import Variant, flat, is_of_the_call, told_apart
from kcoord.report.findings import Kernel
from kcoord.report.relatives import whole_key
from kcoord.report.tables import first_few
from kcoord.telemetry.spans import KEY_DIGITS, plain_text

_FEW = 4
_LONGEST_VALUE = 40  # characters


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
    keys = [whole_key(manifest) for manifest in same]
    return told_apart([{name: each.text for name, each in flat((*key.factors, *key.details))} for key in keys])


def variant_text(variant: Variant) -> str:
    """``BLOCK=64, num_warps=4``; other factors than the call's with their whole names."""
    named = (
        (name.partition(" ")[2] or name if is_of_the_call(name) else name, value) for name, value in variant.items()
    )
    return plain_text(first_few([f"{name}={plain_text(value, _LONGEST_VALUE)}" for name, value in named], _FEW))


def tell_apart(kernels: Sequence[Kernel], manifests: Iterable[Manifest]) -> None:
    """Set the `variant` of each of a job's kernels."""
    keys = {kernel.key for kernel in kernels}
    found = variants_of(m for m in manifests if m.key.digest[:KEY_DIGITS] in keys)
    texts = {digest[:KEY_DIGITS]: variant_text(variant) for digest, variant in found.items()}
    for kernel in kernels:
        kernel.variant = texts.get(kernel.key, "")
