"""The definitions of a module's text: an edit changes the digest of what was edited, and of nothing else."""

from __future__ import annotations

import pytest

from kcoord.keys.function.definitions import MOST, definitions_of

TEXT = '''\
"""A module."""
import os

SCALE = 1.5
DEPTH: int = 3
def helper(x):
    return x * SCALE

@os.cache
def cached():
    def inner(): return 1
    return inner

class Config(
    object,
):
    """A class."""
    size = 4

    @property
    def tile(self): return self.size

    class Inner:
        def go(self): pass

async def late(): pass

print(SCALE); print(helper)
'''


def lines(text: str) -> dict[str, int]:
    return {name: int(each.partition(":")[0]) for name, each in definitions_of(text).items()}


def changed(before: str, after: str, text: str = TEXT) -> set[str]:
    """The names whose digests differ once `before` is `after`."""
    assert text.count(before) == 1
    old, new = definitions_of(text), definitions_of(text.replace(before, after))
    return {n for n in old | new if old.get(n, "").partition(":")[2] != new.get(n, "").partition(":")[2]}


def test_functions_classes_methods_and_constants_have_their_lines() -> None:
    assert lines(TEXT) == {
        "<module>": 1, "SCALE": 4, "DEPTH": 5, "helper": 6, "cached": 10, "Config": 14, "Config.tile": 21, "Config.Inner": 23,
        "Config.Inner.go": 24, "late": 26,
    }  # fmt: skip
    assert all(len(each.partition(":")[2]) == 8 for each in definitions_of(TEXT).values())


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ("1.5", "2.5", {"SCALE"}),
        ("int = 3", "int = 4", {"DEPTH"}),
        ("x * SCALE", "x + SCALE", {"helper"}),
        ("@os.cache\n", "@os.memo\n", {"cached"}),
        ("return 1", "return 2", {"cached"}),
        ("size = 4", "size = 8", {"Config"}),
        ("    object,\n", "", {"Config"}),
        ("@property\n    def tile", "def tile", {"Config.tile"}),
        ("self.size", "self.size + 1", {"Config.tile"}),
        ("pass\n\nasync", "return\n\nasync", {"Config.Inner.go"}),
        ("print(helper)", "print(late)", {"<module>"}),
        ("import os", "import os, sys", {"<module>"}),
        ("helper(x)", "other(x)", {"helper", "other"}),
    ],
)
def test_an_edit_changes_the_digest_of_the_smallest_definition_around_it(
    before: str, after: str, names: set[str]
) -> None:
    assert changed(before, after) == names


@pytest.mark.parametrize(
    ("before", "after"),
    [("import os\n", "# one\n\nimport os\n"), ("):\n    \"", "):\n\n    \""), ("@property", "# of the tile\n    @property")],
    ids=["at the top", "below a class", "in a class"],
)  # fmt: skip
def test_comments_and_blank_lines_between_statements_move_lines_alone(before: str, after: str) -> None:
    assert changed(before, after) == set()
    assert lines(TEXT) != lines(TEXT.replace(before, after))


def test_a_name_that_is_defined_twice_has_one_entry_of_both_texts() -> None:
    text = "class A:\n  def f(self): return 1\n  def f(self, x): return 2\n"
    assert lines(text) == {"A": 1, "A.f": 2}
    assert changed("return 1", "return 3", text) == changed("return 2", "return 3", text) == {"A.f"}


def test_lines_are_counted_as_python_counts_them_and_columns_in_bytes() -> None:
    text = "a = 'é\x0c\u2028'; b = 1\r\ndef f(): return 'é'\n"
    assert lines(text) == {"a": 1, "b": 1, "f": 2}
    assert changed("b = 1", "b = 2", text) == {"b"}
    assert changed("return 'é'", "return 'è'", text) == {"f"}


def test_what_does_not_parse_has_no_definitions() -> None:
    for text in ("def f(:", "\0", "x = '\ud800'", "(" * 5000):
        assert definitions_of(text) == {}
    assert definitions_of("# nothing\n") == {}


def test_a_text_that_its_import_has_warned_of_warns_no_more() -> None:
    assert set(definitions_of("x = '\\d'\n")) == {"x"}


def test_definitions_beyond_the_most_count_as_the_module() -> None:
    text = "".join(f"def f{n}(): return 0\n" for n in range(300))
    assert len(definitions_of(text)) == MOST
    assert changed("def f299(): return 0", "def f299(): return 1", text) == {"<module>"}
    assert changed("def f3(): return 0", "def f3(): return 1", text) == {"f3"}
    assert len(definitions_of(text + "print(1)\n")) == len(definitions_of("print(1)\n" + text)) == MOST
