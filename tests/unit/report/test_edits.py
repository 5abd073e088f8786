"""Two keys compared in words: the definition that was edited, in one line for each file."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from kcoord.artifacts.manifest import Manifest, Origin
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.function.definitions import definitions_of
from kcoord.report.differences import distinguishing_factors, factor_diffs, nearest

HELPERS = "import os\n\n\ndef helper(x):\n    return x\n\n\nclass Config:\n    def tile(self): return 1\n"


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def key(files: dict[str, str], details: dict[str, Any] | None = None, **factors: Any) -> CacheKey:
    """A key with these modules' texts, and their definitions unless it has other `details`."""
    definitions = {"definitions": {module: definitions_of(text) for module, text in files.items()}}
    found = CacheKey.of("python", "build", files={module: sha(text) for module, text in files.items()}, **factors)
    return found.with_details(definitions if details is None else details)


def manifest(key: CacheKey, created: float = 0.0) -> Manifest:
    """As it is read from a disk."""
    return Manifest.decode(Manifest(key, (), 2.0, Origin(created=created)).encode())


def told(before: CacheKey, now: CacheKey) -> list[str]:
    return [str(each) for each in factor_diffs(manifest(before), manifest(now))]


def edited(before: str, after: str) -> list[str]:
    """What is told if `before` becomes `after` in `HELPERS`."""
    assert before in HELPERS
    return told(key({"pkg.helpers": HELPERS}), key({"pkg.helpers": HELPERS.replace(before, after)}))


@pytest.mark.parametrize(
    ("before", "after", "edit"),
    [
        ("return x\n", "return x + 1\n", "helper changed (line 4)"),
        ("return 1", "return 2", "Config.tile changed (line 9)"),
        ("import os", "import sys", "<module> changed (line 1)"),
        ("import os", "import os\nSCALE = 2", "SCALE was added (line 2)"),
        ("def helper(x):\n    return x\n\n\n", "", "helper was removed (line 4)"),
        ("import os\n", "import os  # of course\n\n", "only comments or blank lines changed"),
    ],
)
def test_one_line_names_the_edit_of_a_file(before: str, after: str, edit: str) -> None:
    assert edited(before, after) == [f"file pkg.helpers: {edit}"]


def test_the_first_edit_in_the_file_is_told_and_not_what_it_moved() -> None:
    text = HELPERS.replace("return x\n", "y = x\n    return y\n").replace("return 1", "return 2")
    assert told(key({"m": HELPERS}), key({"m": text})) == ["file m: helper changed (line 4)"]


def test_definitions_in_another_order_are_no_comments() -> None:
    assert told(key({"m": "def a(): ...\ndef b(): ...\n"}), key({"m": "def b(): ...\ndef a(): ...\n"})) == [
        "file m: the order of its definitions changed"
    ]


def test_each_file_has_a_line_also_one_that_is_new_or_gone() -> None:
    old = key({"a": "x = 1\n", "b": "", "same": "z = 1\n"})
    assert told(old, key({"a": "x = 2\n", "c": "", "same": "z = 1\n"})) == [
        "file a: x changed (line 1)", "file b: was removed", "file c: was added",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "details",
    [{}, {"definitions": {}}, {"definitions": {"m": {}}}, {"definitions": {"m": {"f": "x"}}}, {"definitions": "m"},
     {"definitions": {"m": {"f": "1:ab", "g": 3}}}],
    ids=["none", "empty", "of no parse", "no place", "no mapping", "no text"],
)  # fmt: skip
def test_without_definitions_a_file_has_changed(details: dict[str, Any]) -> None:
    old, new = key({"m": "def f(): ...\n"}), key({"m": "def f(): pass\n"}, details)
    assert told(old, new) == told(new, old) == ["file m: changed"]


def test_files_of_others_are_factors_as_any() -> None:
    one, two = CacheKey.of("b", "n", files={"a.cu": "v1"}), CacheKey.of("b", "n", files={"a.cu": "v2"})
    assert told(one, two) == ["files a.cu: v1 → v2"]
    assert told(CacheKey.of("b", "n", files="a" * 64), CacheKey.of("b", "n", files="b" * 64)) == [
        f"files: {'a' * 64} → {'b' * 64}"
    ]
    assert told(CacheKey.of("b", "n", definitions=1), CacheKey.of("b", "n", definitions=2)) == ["definitions: 1 → 2"]


# The most similar, and variants


def test_a_file_counts_once_however_many_definitions_an_edit_moved() -> None:
    many = "".join(f"def f{n}(): ...\n" for n in range(20))
    mine, edit = key({"m": "x = 1\n" + many}, n=0), key({"m": many}, n=0)
    others = [key({"m": many}, n=1), key({"m": "x = 1\n" + many}, n=1, env={"A": "1"}), edit]
    found = nearest([manifest(each, created=float(n)) for n, each in enumerate(others)], manifest(mine))
    assert found is not None
    assert found.key.digest == edit.digest


def test_of_equally_similar_keys_the_newest_is_compared() -> None:
    others = [manifest(key({}, n=n), created=c) for n, c in ((1, 5.0), (2, 9.0), (3, 7.0))]
    found = nearest(others, manifest(key({}, n=0), created=10.0))
    assert found is not None
    assert found.origin.created == 9.0


def test_variants_are_told_apart_by_first_lines_and_by_the_beginnings_of_files_digests() -> None:
    keys = [key({"pkg.m": text}, **{"first line": n}) for n, text in enumerate(("x = 1\n", "x = 2\n"))]
    keys += [key({"pkg.m": "x = 1\n"}, **{"first line": 7})]
    found = distinguishing_factors(map(manifest, keys))
    one, two = (sha(f"x = {n}\n")[:12] for n in (1, 2))
    assert [found[each.digest] for each in keys] == [
        f"pkg.m={one}, first line=0", f"pkg.m={two}, first line=1", f"pkg.m={one}, first line=7",
    ]  # fmt: skip
