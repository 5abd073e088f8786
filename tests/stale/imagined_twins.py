"""Imagined rows: two modules that have one name and one text, but for a constant, and which of them is meant."""

from __future__ import annotations

from collections.abc import Sequence

from tests.stale.imagined_row import reads
from tests.stale.row import Row

_LOADED = """
import importlib.util
from pathlib import Path

def load(file):
    spec = importlib.util.spec_from_file_location("kit", Path(__file__).with_name(file))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""
_TWO_FILES = "one, two = load('one.py'), load('two.py')\n"
_ONE_FILE = "one, two = load('one.py'), load('one.py')\ntwo.N = 2\n"
_TWIN = """
class Tiles:
    def text(self): return N
    @property
    def size(self): return N
def size(): return N
def make(n): return lambda: n()
def text(): return Tiles().text()
config = Tiles()
def held(): return config.text()
def called(): return text()
class Derived(Tiles):
    def text(self): return (super().text(), 5)
def derived(): return (config.text(), Derived().text())
"""
_ONCE = (("one file that is loaded twice", _ONE_FILE),)
_WAYS = (("two files of one text", _TWO_FILES), *_ONCE)
_FILES = {"one.py": f"N = 1\n{_TWIN}", "two.py": f"N = 2\n{_TWIN}"}


def twins(
    what: str, setup: str, expression: str, chosen: str, change: str, undo: str, ways: Sequence[tuple[str, str]] = _ONCE
) -> list[Row]:
    """A row for each of `ways` to have two. `chosen`: a text of `setup` that names the first."""
    edit = (chosen, chosen.replace("one", "two"))
    return [
        reads(f"{what} of {way}", _LOADED + load + setup, expression, edit, change, undo, files=_FILES)
        for way, load in ways
    ]


_TWINS = [
    *(twins(f"{what} in a module in a list", "kept = one.Tiles.text\nMODULES = [one]", f"[m.{each} for m in MODULES]",
            "[one]", "one.Tiles.text = two.Tiles.text", "one.Tiles.text = kept", _WAYS) for what, each in (
        ("a method that is exchanged which a helper calls", "text()"),
        ("a method that is exchanged of an object", "config.text()"),
        ("a method that is exchanged of an object which a helper calls", "held()"))),
]  # fmt: skip


def exchanged(what: str, place: str, expression: str) -> list[Row]:
    """The second of two in one list takes from the first what is at `place`."""
    setup = f"pair = [one, two]\nkept = two{place}\n"
    change = f"two{place} = one{place}"
    return [
        reads(f"{what} of {way}", _LOADED + load + setup, expression, (setup, setup + change), change,
              f"two{place} = kept", files=_FILES)
        for way, load in _WAYS
]  # fmt: skip


_EXCHANGED = [
    exchanged("a method that one class takes from the other", ".Tiles.text", "(pair[0].size(), (lambda m: m.held())(two))"),
    exchanged("a function that one module takes which a helper calls", ".text", "[m.called() for m in pair]"),
]  # fmt: skip

ROWS = [row for rows in (*_TWINS, *_EXCHANGED) for row in rows]
