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
    twins("which function", "chosen = one.size", "chosen()", "= one.size", "chosen = two.size", "chosen = one.size"),
    twins("which function in a table", "TABLE = {'f': one.size}", "TABLE['f']()", "one.size", "TABLE['f'] = two.size",
          "TABLE['f'] = one.size"),
    twins("which function in a closure", "chosen = one.make(one.size)", "chosen()", "(one.size", "chosen = one.make(two.size)",
          "chosen = one.make(one.size)", _WAYS),
    twins("which function in a partial", "chosen = functools.partial(one.size)", "chosen()", "one.size",
          "chosen = functools.partial(two.size)", "chosen = functools.partial(one.size)"),
    twins("which function as a default", "def helper(f=one.size): return f()", "helper()", "one.size",
          "helper.__defaults__ = (two.size,)", "helper.__defaults__ = (one.size,)"),
    twins("which function under functools.wraps", "def wrap(f): return functools.wraps(f)(lambda: f())\nchosen = wrap(one.size)",
          "chosen()", "one.size", "chosen = wrap(two.size)", "chosen = wrap(one.size)"),
    twins("which function as a static method", "class Config:\n    size = staticmethod(one.size)", "Config.size()", "one.size",
          "Config.size = staticmethod(two.size)", "Config.size = staticmethod(one.size)"),
    twins("which method", "class Config:\n    text = one.Tiles.text", "Config().text()", "one.Tiles",
          "Config.text = two.Tiles.text", "Config.text = one.Tiles.text"),
    twins("which bound method", "chosen = one.Tiles().text", "chosen()", "one.Tiles", "chosen = two.Tiles().text",
          "chosen = one.Tiles().text"),
    twins("which property", "class Config:\n    size = one.Tiles.size", "Config().size", "one.Tiles",
          "Config.size = two.Tiles.size", "Config.size = one.Tiles.size"),
    twins("which class", "chosen = one.Tiles", "chosen().text()", "one.Tiles", "chosen = two.Tiles", "chosen = one.Tiles"),
    twins("which class in a list", "CLASSES = [one.Tiles]", "[c().text() for c in CLASSES]", "one.Tiles",
          "CLASSES[0] = two.Tiles",
          "CLASSES[0] = one.Tiles"),
    twins("which base class", "class Config(one.Tiles): pass", "Config().text()", "one.Tiles", "Config.__bases__ = (two.Tiles,)",
          "Config.__bases__ = (one.Tiles,)"),
    twins("the class of an object", "chosen = one.Tiles()", "chosen.text()", "one.Tiles", "chosen.__class__ = two.Tiles",
          "chosen.__class__ = one.Tiles"),
    twins("which module", "chosen = one", "chosen.size()", "chosen = one", "chosen = two", "chosen = one"),
    twins("which module in a list", "MODULES = [one]", "[m.size() for m in MODULES]", "[one]", "MODULES[0] = two",
          "MODULES[0] = one"),
    twins("a method that is exchanged", "kept = one.Tiles.text\nchosen = one", "chosen.Tiles().text()", "chosen = one",
          "one.Tiles.text = two.Tiles.text", "one.Tiles.text = kept"),
    twins("a function that is exchanged", "kept = one.size\nchosen = one", "chosen.size()", "chosen = one",
          "one.size = two.size", "one.size = kept"),
    twins("a method that is exchanged in a class in a list", "kept = one.Tiles.text\nCLASSES = [one.Tiles]",
          "[c().text() for c in CLASSES]", "[one.Tiles]", "one.Tiles.text = two.Tiles.text", "one.Tiles.text = kept"),
    *(twins(f"{what} in a module in a list", "kept = one.Tiles.text\nMODULES = [one]", f"[m.{each} for m in MODULES]",
            "[one]", "one.Tiles.text = two.Tiles.text", "one.Tiles.text = kept", _WAYS) for what, each in (
        ("a method that is exchanged which a helper calls", "text()"),
        ("a method that is exchanged of an object", "config.text()"),
        ("a method that is exchanged of an object which a helper calls", "held()"))),
    twins("a method that is exchanged in a module that a lambda is given", "kept = one.Tiles.text\nchosen = one",
          "(lambda m: m.held())(chosen)", "chosen = one", "one.Tiles.text = two.Tiles.text", "one.Tiles.text = kept", _WAYS),
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
    exchanged("a method that one class takes which a derived one reaches", ".Tiles.text",
              "(pair[0].size(), (lambda m: m.derived())(two))"),
    exchanged("a method that one class takes, in all of them", ".Tiles.text", "[m.text() for m in pair]"),
    exchanged("a property that one class takes from the other", ".Tiles.size", "[m.config.size for m in pair]"),
    exchanged("a function that one module takes from the other", ".size", "[m.size() for m in pair]"),
    exchanged("a function that one module takes which a helper calls", ".text", "[m.called() for m in pair]"),
    exchanged("an object that one module takes from the other", ".config", "[m.held() for m in pair]"),
]  # fmt: skip

ROWS = [row for rows in (*_TWINS, *_EXCHANGED) for row in rows]
