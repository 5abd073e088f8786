"""Texts that tell the keys of one kernel apart: ``BLOCK=64, num_warps=4``."""

from __future__ import annotations

from collections.abc import Iterable

from kcoord.artifacts.manifest import Manifest
from kcoord.report.differences import by_key_and_name, differences_of
from kcoord.report.tables import first_few
from kcoord.telemetry.spans import plain_text

_FEW = 4
_LONGEST_VALUE = 40  # characters


def variants_of(manifests: Iterable[Manifest]) -> dict[str, str]:
    """By digest, the factors in which each key differs from the first of its kernel, and the first from the others."""
    found: dict[str, str] = {}
    for first, *others in by_key_and_name(manifests)[1].values():
        pairs = [(m, differences_of(first, m)) for m in others if m.key.digest != first.key.digest]
        usual = {name: before for _, differences in pairs for name, before, _ in differences}
        for manifest, differences in [(first, ()), *pairs]:
            values = {**usual, **{name: now for name, _, now in differences}}
            texts = [f"{name.rpartition(' ')[2]}={plain_text(values[name], _LONGEST_VALUE)}" for name in sorted(values)]
            found[manifest.key.digest] = plain_text(first_few(list(dict.fromkeys(texts)), _FEW))
    return found
