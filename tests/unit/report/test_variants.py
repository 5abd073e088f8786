"""Variants of one kernel are told apart by the factors in which their keys differ."""

from __future__ import annotations

from typing import Any

from kcoord.artifacts.manifest import Manifest, Origin
from kcoord.keys.cache_key import CacheKey
from kcoord.report.differences import distinguishing_factors
from tests.support.command import as_json, kcoord
from tests.support.pages import Text, make
from tests.support.sandbox import Sandbox, eventually


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


def test_ls_and_the_report_tell_variants_of_a_kernel_apart(sandbox: Sandbox) -> None:
    for block in (64, 128):
        make(sandbox, "j", constants={"BLOCK": block, "EVEN": 1})
    make(sandbox, "j", "alone", constants={"BLOCK": 64})
    listed = as_json(sandbox, "ls")
    assert [a["variant"] for a in listed if a["name"] == "alone"] == [""]
    block_of = {a["digest"][:12]: a["variant"] for a in listed if a["name"] == "scale"}
    assert sorted(block_of.values()) == ["BLOCK=128", "BLOCK=64"]
    rows = {line.split()[0]: line for line in kcoord(sandbox, "ls").stdout.splitlines()}
    for key, block in block_of.items():
        assert rows[key].endswith(f" {block}")
    assert "BLOCK" not in kcoord(sandbox, "ls", "alone").stdout

    def seen() -> str:
        kcoord(sandbox, "report", "j")
        return Text((sandbox.root / "kcoord-j.html").read_text()).text

    eventually(lambda: "3 kernels compiled" in seen())
    for key, block in block_of.items():
        assert f"{key} {block}" in seen()
