"""Variants of one kernel are told apart by the factors in which their keys differ."""

from __future__ import annotations

from typing import Any

import pytest

from kcoord.artifacts.manifest import Manifest, Origin
from kcoord.keys.cache_key import CacheKey
from kcoord.report.variants import variant_text, variants_of
from tests.support.command import as_json, kcoord
from tests.support.pages import Text, make
from tests.support.sandbox import Sandbox, eventually


def variants(*details: dict[str, Any], name: str = "matmul") -> list[str]:
    """The texts of keys that are opaque hashes, as Triton's are, and are explained by `details`."""
    keys = [CacheKey.of("test", name, own=f"{n:064x}").with_details(each) for n, each in enumerate(details)]
    found = variants_of(Manifest.decode(Manifest(key, (), 1.0, Origin()).encode()) for key in keys)
    return [variant_text(found.get(key.digest, {})) for key in keys]


def test_constants_and_options_that_differ_tell_keys_apart_and_those_that_are_equal_are_not_named() -> None:
    assert variants(
        {"constants": {"BLOCK": 64, "EVEN": True}, "options": {"num_warps": 4}},
        {"constants": {"BLOCK": 128, "EVEN": True}, "options": {"num_warps": 4}},
        {"constants": {"BLOCK": 64, "EVEN": True}, "options": {"num_warps": 8}},
    ) == ["BLOCK=64, num_warps=4", "BLOCK=128, num_warps=4", "BLOCK=64, num_warps=8"]


def test_a_value_that_only_some_keys_have_is_unset_in_the_others() -> None:
    assert variants({"constants": {"BLOCK": 64}}, {"constants": {"BLOCK": 64, "HALF": 1}}) == ["HALF=unset", "HALF=1"]


def test_factors_of_the_call_come_before_those_around_it() -> None:
    first, _ = variants({"env": {"A": "1"}, "constants": {"Z": 1}}, {"env": {"A": "2"}, "constants": {"Z": 2}})
    assert first == "Z=1, env A=1"


def test_keys_for_several_gpus_differ_in_their_target_and_within_it() -> None:
    def on(target: str, block: int) -> dict[str, Any]:
        return {"target": target, "constants": {"BLOCK": block}, "options": {"arch": target}}

    assert variants(on("cuda:90", 64), on("cuda:90", 128), on("hip:gfx942", 64)) == [
        "target=cuda:90, BLOCK=64", "target=cuda:90, BLOCK=128", "target=hip:gfx942",
    ]  # fmt: skip


def test_hashes_tell_nothing() -> None:
    assert variants({"source": "a" * 64}, {"source": "b" * 64}) == ["", ""]


def test_many_and_long_values_are_cut() -> None:
    many = [{"constants": {f"C{n}": each * 100 for n in range(9)}} for each in "xy"]
    first, second = variants(*many)
    assert first.endswith("and 5 more")
    assert first != second
    assert len(first) <= 200


@pytest.mark.parametrize("other", ["another", "matmul"])
def test_a_key_that_is_alone_with_its_name_has_no_variant(other: str) -> None:
    keys = [CacheKey.of("test", "matmul", n=1), CacheKey.of("test", other, n=2)]
    found = variants_of(Manifest(key, (), 1.0, Origin()) for key in keys)
    assert bool(found) == (other == "matmul")


def test_ls_and_the_report_tell_variants_of_a_kernel_apart(sandbox: Sandbox) -> None:
    for block in (64, 128):
        make(sandbox, "j", constants={"BLOCK": block, "EVEN": 1})
    make(sandbox, "j", "alone", constants={"BLOCK": 64})
    listed = as_json(sandbox, "ls")
    assert [a["variant"] for a in listed if a["name"] == "alone"] == [{}]
    block_of = {a["digest"][:12]: a["variant"]["constants BLOCK"] for a in listed if a["name"] == "scale"}
    assert sorted(block_of.values()) == ["128", "64"]
    rows = {line.split()[0]: line for line in kcoord(sandbox, "ls").stdout.splitlines()}
    for key, block in block_of.items():
        assert rows[key].endswith(f" BLOCK={block}")
    assert "BLOCK" not in kcoord(sandbox, "ls", "alone").stdout

    def seen() -> str:
        kcoord(sandbox, "report", "j")
        return Text((sandbox.root / "kcoord-j.html").read_text()).text

    eventually(lambda: "3 kernels were compiled" in seen())
    for key, block in block_of.items():
        assert f"{key} BLOCK={block}" in seen()
