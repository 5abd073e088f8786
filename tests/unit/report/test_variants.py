"""Variants of one kernel are told apart by the factors in which their keys differ."""

from __future__ import annotations

from typing import Any

from kcoord.artifacts.manifest import Manifest, Origin
from kcoord.keys.cache_key import CacheKey
from kcoord.report.differences import distinguishing_factors


def variants(*details: dict[str, Any], name: str = "matmul") -> list[str]:
    """The texts of keys that are opaque hashes, as Triton's are, and are explained by `details`."""
    keys = [CacheKey.of("test", name, own=f"{n:064x}").with_details(each) for n, each in enumerate(details)]
    found = distinguishing_factors(Manifest.decode(Manifest(key, (), 1.0, Origin()).encode()) for key in keys)
    return [found[key.digest] for key in keys]


def test_constants_and_options_that_differ_tell_keys_apart_and_those_that_are_equal_are_not_named() -> None:
    assert variants(
        {"constants": {"BLOCK": 64, "EVEN": True}, "options": {"num_warps": 4}},
        {"constants": {"BLOCK": 128, "EVEN": True}, "options": {"num_warps": 4}},
        {"constants": {"BLOCK": 64, "EVEN": True}, "options": {"num_warps": 8}},
    ) == ["BLOCK=64, num_warps=4", "BLOCK=128, num_warps=4", "BLOCK=64, num_warps=8"]
