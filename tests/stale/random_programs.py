"""Small random programs: modules that share a name, functions that share theirs, values, closures, classes, aliases.

``python -m tests.stale.random_programs SEED FAMILIES ORDER HOME`` runs them, ``forth`` or ``back``, and prints one JSON line:
for each state of each program, its name, its output and its key, or its error. A family is a program and others that differ
from it in one draw. The generator itself, `Draws`, is a list of numbers, so that one of them can be altered.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

_VALUES = (
    "1", "2", "True", "1.0", "0.0", "-0.0", "'1'", "b'1'", "[1]", "(1,)", "[1, [2]]", "[[1], 2]", "{'a': 1, 'b': 2}",
    "{'b': 2, 'a': 1}", "frozenset({1})", "{1}", "{1: 'a'}", "{True: 'a'}", "None", "range(2)", "int", "bool", "1j", "...",
)  # fmt: skip
_BODIES = (
    "x + 1", "1 + x", "x - 1", "(x, N)", "(x, M)", "(N, M)", "(M, N)", "unit()", "other()",
    "-unit() if N else other()", "Tiles().text()", "Tiles.k", "Tall().text()", "config.tile", "config.text()",
    "made()", "step()", "table['f']()", "[n for n in (1, N)]", "(lambda: N)()", "(lambda: M)()", "default()",
    "getattr(config, 'tile')", "sorted([2, 1], key=sign)", "Tiles().size", "steps[0]()", "noted.n",
    "(0, 1 if N == 1 else 2)", "f'{N}'", "f'{N!r}{M}'", "[*outer()]", "held(config)", "[c.tile for c in (config,)]",
    "(c := config).tile", "functools.reduce(joined, (x, N))", "list(map(held, [config]))", "Tiles.made(x)",
    "Tiles.own()", "first(x)", "str(kind.value)",
)  # fmt: skip
_KIT = """
import enum
import functools
N = {n}
M = {m}
def unit(): return {unit}
def other(): return {other}
def default(n={n}, *, m={m}): return (n, m)
def sign(n): return {sign}
def held(c): return c.tile
def joined(a, b): return (a, b, M)
def first(n): return n if n < 1 else second(n - 1)
def second(n): return first(n - 1) if n else {unit}
class Tiles:
    k = {k}
    def text(self): return {text}
    made = staticmethod(lambda x: (x, {other}))
    @classmethod
    def own(cls): return (cls.k, {m})
    @property
    def size(self): return {size}
class Tall(Tiles):
    def text(self): return (super().text(), {k})
class Kind(enum.Enum):
    A = {n}
    B = "b"
def make(n):
    def made(): return (n, {made})
    return made
made = make({closed})
step = functools.partial(default, {n})
table = {{"f": {chosen}, "g": unit}}
steps = [{chosen}, other]
config = Tiles()
config.tile = {tile}
kind = Kind.{member}
def noted(): pass
noted.n = {m}
def outer():
    def inner(): return {k}
    yield inner()
    yield {m}
def size(x): return {body}
"""
_SUBJECT = """
import kcoord
N = {n}
f, g = one.size, two.size
chosen = {module}
Tiles = {module}.Tiles
pair = [one, two]
def own(x): return {own}
@kcoord.compile_once(scope=kcoord.Scope.TARGET, on_drift="rekey")
def build(x, *, staging):
    (staging / "kernel").write_text(repr({out}))
"""
_OUTPUTS = (
    "one.size(x)", "two.size(x)", "f(x)", "g(x)", "(f(x), g(x))", "(g(x), f(x))", "(one.N, two.M)", "chosen.size(x)",
    "Tiles().text()", "own(x)", "[m.size(x) for m in pair]", "pair[1].unit()", "one.table['f']()",
    "(lambda m: m.size(x))(two)", "two.made()", "(one.made(), two.made())", "chosen.config.text()",
    "[h(x) for h in (f, g)]",
)  # fmt: skip
_CHANGES = (
    "one.N = {value}", "two.M = {value}", "one.size = two.size", "two.size = one.size", "f = g", "chosen = one",
    "chosen = two", "one.Tiles.k = {value}", "two.Tiles.text = one.Tiles.text", "one.config.tile = {value}",
    "one.config.__class__ = two.Tiles", "one.size.__code__ = two.size.__code__",
    "two.default.__defaults__ = ({value},)", "one.table['f'] = two.table['f']", "pair.reverse()",
    "two.unit = one.other", "one.noted.n = {value}", "one.made = two.made", "N = {value}",
    "two.made.__closure__[0].cell_contents = {value}", "one.Tall.__bases__ = (two.Tiles,)", "two.steps.reverse()",
    "one.step.keywords['m'] = {value}", "two.default.__kwdefaults__['m'] = {value}", "del one.Tall.text",
)  # fmt: skip
_WAYS = ("exec", "text", "foreign", "path", "path", "registered")


class Draws:
    """Choices by a list of numbers, which grows as more are asked for."""

    def __init__(self, seed: random.Random, numbers: Sequence[int] = ()) -> None:
        self.numbers = list(numbers)
        self._seed, self._next = seed, 0

    def of(self, options: Sequence[T]) -> T:
        if self._next == len(self.numbers):
            self.numbers.append(self._seed.randrange(1 << 16))
        self._next += 1
        return options[self.numbers[self._next - 1] % len(options)]

    def altered(self, at: int) -> Draws:
        other = list(self.numbers)
        other[at] = self._seed.randrange(1 << 16)
        return Draws(self._seed, other)


@dataclass(frozen=True)
class Program:
    name: str
    kits: tuple[tuple[str, str], tuple[str, str]]
    """How each of its two modules, which share a name, is loaded, and its text."""
    subject: tuple[str, str]
    changes: tuple[str, ...]
    """What is done to it one after another."""

    @property
    def ways(self) -> str:
        return " ".join(way for way, _ in (*self.kits, self.subject))


def program(name: str, draws: Draws) -> Program:
    def kit() -> tuple[str, str]:
        values = {n: draws.of(_VALUES) for n in ("n", "m", "k", "tile", "closed")}
        inner = {n: draws.of(("N", "M", "1", "2", "(N, 1)")) for n in ("unit", "other", "text", "size", "made")}
        more = {"sign": draws.of(("n", "-n")), "chosen": draws.of(("unit", "other")), "member": draws.of("AB")}
        body = f"({draws.of(_BODIES)}, {draws.of(_BODIES)})"
        return draws.of(_WAYS), _KIT.format(**values, **inner, **more, body=body)

    one = kit()
    kits = one, draws.of((one, kit()))
    own = draws.of(("one.size(x)", "two.size(x)", "N", "one.N", "two.unit()"))
    out = f"({draws.of(_OUTPUTS)}, {draws.of(_OUTPUTS)})"
    subject = _SUBJECT.format(n=draws.of(_VALUES), module=draws.of(("one", "two")), own=own, out=out)
    changes = tuple(draws.of(_CHANGES).format(value=draws.of(_VALUES)) for _ in range(2))
    return Program(name, kits, (draws.of(_WAYS[:4]), subject), changes)


def families(seed: int, count: int, others: int = 12) -> Iterator[Program]:
    source = random.Random(seed)
    for number in range(count):
        draws = Draws(source)
        yield program(f"{number}", draws)
        for other, at in enumerate(source.sample(range(len(draws.numbers)), others)):
            yield program(f"{number}.{other}", draws.altered(at))


def load(name: str, way: str, text: str, home: Path, **more: Any) -> ModuleType:
    """A module of `text`. Its file, where it has one, is that of all modules of its name, one after another."""
    module, file = ModuleType(name), home / f"{name}.py"
    vars(module).update(more)
    if way in ("path", "registered"):
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        vars(module).update(more)
        if way == "registered":
            sys.modules[name] = module
        spec.loader.exec_module(module)
    else:
        shown = {"exec": "<string>", "text": f"<{name}>", "foreign": str(file)}[way]  # the text at `file` is another's
        exec(compile(text, shown, "exec"), vars(module))
    return module


def states(each: Program, home: Path) -> Iterator[dict[str, str]]:
    one, two = (load("kit", *kit, home) for kit in each.kits)
    subject = load("subject", *each.subject, home, one=one, two=two)
    for number, change in enumerate(("", *each.changes)):
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # it does not fit what has been drawn
            exec(change, vars(subject))
        yield {"name": f"{each.name} after {number} changes", "ways": each.ways, **state(subject)}
    sys.modules.pop("kit", None)


def state(subject: ModuleType) -> dict[str, str]:
    staging = Path(tempfile.mkdtemp())
    try:
        subject.build.__wrapped__(3, staging=staging)
        output = (staging / "kernel").read_text()
    except Exception as error:  # noqa: BLE001 - a program that fails is one, too
        output = repr(error)
    try:
        return {"output": output, "key": subject.build.key(3).digest}
    except Exception as error:  # noqa: BLE001 - the test says which may be raised
        return {"output": output, "error": f"{type(error).__name__}: {error}"}


def main(seed: str, count: str, order: str, home: str) -> None:
    sys.dont_write_bytecode = True
    programs = list(families(int(seed), int(count)))
    found = [s for each in programs[:: 1 if order == "forth" else -1] for s in states(each, Path(home))]
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
