"""Imagined rows: classes and what they are made of, objects and what their classes do for them."""

from __future__ import annotations

from tests.stale.imagined_row import does, reads, swaps
from tests.stale.row import Row

DESCRIPTORS = [
    reads("the name that __set_name__ has noted", "class Field:\n    def __set_name__(self, owner, name): self.name = name\n"
          "    def __get__(self, held, owner): return self.name\nclass Config:\n    tile = Field()\nconfig = Config()",
          "config.tile", ("self.name = name", "self.name = name + '_'"), "vars(Config)['tile'].name = 'other'",
          "vars(Config)['tile'].name = 'tile'"),
    reads("what a cached property of a global object is computed from", "class Config:\n    def __init__(self): self.n = 1\n"
          "    @functools.cached_property\n    def tile(self): return self.n\nconfig = Config()", "config.tile",
          ("self.n = 1", "self.n = 2"), "config.n = 2\nvars(config).pop('tile', None)",
          "config.n = 1\nvars(config).pop('tile', None)"),
    reads("what a slot holds", "class Config:\n    __slots__ = ('tile',)\nconfig = Config()\nconfig.tile = 1", "config.tile",
          ("tile = 1", "tile = 2"), "config.tile = 2", "config.tile = 1"),
    reads("what a slot of a base class holds", "class Base:\n    __slots__ = ('tile',)\nclass Config(Base):\n"
          "    __slots__ = ('n',)\nconfig = Config()\nconfig.n = 5\nconfig.tile = [1]", "(config.n, config.tile)",
          ("[1]", "[2]"), "config.tile[0] = 2", "config.tile[0] = 1"),
]  # fmt: skip

BASES = [
    swaps("a method that an abstract one is implemented by", "import abc\nclass Base(abc.ABC):\n    @abc.abstractmethod\n"
          "    def unit(self): ...\n    def size(self): return self.unit()\nclass Config(Base):\n    def unit(self): return 1\n"
          "config: Base = Config()", "config.size()", ("return 1", "return 5"), "Config.unit", "lambda self: 7"),
    reads("a subclass that registers itself", "REGISTRY = {}\nclass Base:\n    def __init_subclass__(cls):\n"
          "        REGISTRY[cls.__name__] = cls\nclass One(Base):\n    def size(self): return 1\nkept = One.size",
          "REGISTRY['One']().size()", ("return 1", "return 2"), "One.size = lambda self: 3", "One.size = kept"),
    reads("the subclasses of a class", "class Base: pass\nclass One(Base): tile = 1\nkept = []",
          "sorted(c.tile for c in Base.__subclasses__())", ("tile = 1", "tile = 2"),
          "class Two(Base): tile = 5\nkept.append(Two)", "import gc\nkept.clear()\ndel Two\ngc.collect()", refuses=True),
    reads("an argument of a generic alias", "from typing import get_args\nTYPE = list[int]", "get_args(TYPE)",
          ("list[int]", "list[str]"), "TYPE = list[str]", "TYPE = list[int]", refuses=True),
    swaps("a method of a class that is nested in a class", "class Outer:\n    class Inner:\n        def size(self): return 1",
          "Outer.Inner().size()", ("return 1", "return 2"), "Outer.Inner.size", "lambda self: 3"),
]  # fmt: skip


def _protocol(what: str, method: str, old: str, new: str, expression: str, **more: object) -> Row:
    """What a special method of a global object's class does where no one names it."""
    setup = f"class Config:\n    def {method}: return {old}\nconfig = Config()"
    name, arguments = method.rstrip(")").split("(")
    return swaps(what, setup, expression, (f"return {old}", f"return {new}"), f"Config.{name}",
                 f"lambda {arguments}: {new}", **more)  # fmt: skip


PROTOCOLS = [
    _protocol("what an object contains", "__contains__(self, n)", "True", "False", "x in config", refuses=True),
    does("how a class makes its objects", "class Config:\n    def __new__(cls, n):\n        self = super().__new__(cls)\n"
         "        self.tile = n + 1\n        return self\nkept = Config.__new__", "out = Config(x).tile", ("n + 1", "n + 2"),
         "def new(cls, n):\n    return SimpleNamespace(tile=0)\nConfig.__new__ = new", "Config.__new__ = kept"),
]  # fmt: skip

DATACLASSES = [
    reads("a default factory that is a lambda", "from dataclasses import field\n@dataclass\nclass Config:\n"
          "    sizes: list = field(default_factory=lambda: [1])", "Config().sizes", ("[1]", "[2]"),
          "kept = Config.__init__\nConfig.__init__ = lambda self: setattr(self, 'sizes', [3])", "Config.__init__ = kept"),
    reads("a default of a dataclass's field", "@dataclass\nclass Config:\n    tile: int = 1", "Config().tile",
          ("int = 1", "int = 2"), "Config.__init__.__defaults__ = (2,)", "Config.__init__.__defaults__ = (1,)"),
    reads("what dataclasses.replace replaces in a global object", "import dataclasses\n@dataclass(frozen=True)\nclass Config:\n"
          "    tile: int = 1\n    n: int = 2\nconfig = Config()", "dataclasses.replace(config, tile=x)",
          ("n: int = 2", "n: int = 3"), "object.__setattr__(config, 'n', 3)", "object.__setattr__(config, 'n', 2)"),
    reads("the metadata of a dataclass's field", "import dataclasses\n@dataclass\nclass Config:\n"
          "    tile: int = dataclasses.field(default=1, metadata={'unit': 'byte'})",
          "dataclasses.fields(Config)[0].metadata['unit']", ("'byte'", "'word'"),
          "Config.__dataclass_fields__['tile'].metadata = {'unit': 'bit'}",
          "Config.__dataclass_fields__['tile'].metadata = {'unit': 'byte'}"),
    reads("the names of a dataclass's fields", "import dataclasses\n@dataclass\nclass Config:\n    tile: int = 1",
          "[f.name for f in dataclasses.fields(Config)]", ("tile: int = 1", "tile: int = 1\n    warps: int = 4"),
          "kept = dict(Config.__dataclass_fields__)\nConfig.__dataclass_fields__.clear()",
          "Config.__dataclass_fields__.update(kept)"),
    reads("an attribute of an enum's member beside its value", "import enum\nclass Kind(enum.Enum):\n    FAST = 'f', 1\n"
          "    def __new__(cls, value, tile):\n        self = object.__new__(cls)\n        self._value_ = value\n"
          "        self.tile = tile\n        return self\nkind = Kind.FAST", "kind.tile", ("'f', 1", "'f', 2"),
          "Kind.FAST.tile = 2", "Kind.FAST.tile = 1"),
    swaps("what an enum makes of a missing value", "import enum\nclass Kind(enum.Enum):\n    ONE = 1\n    TWO = 2\n"
          "    @classmethod\n    def _missing_(cls, value): return cls.ONE", "Kind(9)", ("cls.ONE", "cls.TWO"),
          "Kind._missing_", "classmethod(lambda cls, value: Kind.TWO)"),
    reads("the value of an enum's member", "import enum\nclass Kind(enum.Enum):\n    FAST = 1", "Kind.FAST.value",
          ("FAST = 1", "FAST = 2"), "Kind.FAST._value_ = 2", "Kind.FAST._value_ = 1"),
    reads("the order of an enum's members", "import enum\nKind = enum.Enum('Kind', ['A', 'B'])", "[k.name for k in Kind]",
          ("['A', 'B']", "['B', 'A']"), "Kind._member_names_.reverse()", "Kind._member_names_.reverse()"),
    reads("a combination of an enum's flags", "import enum\nclass Flags(enum.Flag):\n    A = 1\n    B = 2\n    C = 4\n"
          "flags = Flags.A | Flags.B", "flags", ("A | Flags.B", "A | Flags.C"), "flags = Flags.A | Flags.C",
          "flags = Flags.A | Flags.B"),
    reads("a default of a named tuple's field", "from collections import namedtuple\n"
          "Shape = namedtuple('Shape', 'm n', defaults=(1,))", "Shape(x).n", ("(1,)", "(2,)"),
          "Shape.__new__.__defaults__ = (2,)", "Shape.__new__.__defaults__ = (1,)"),
    swaps("a property of a named tuple's subclass", "from collections import namedtuple\n"
          "class Shape(namedtuple('Shape', 'm')):\n    @property\n    def size(self): return self.m + 1\nshape = Shape(3)",
          "shape.size", ("self.m + 1", "self.m + 2"), "Shape.size", "property(lambda self: 0)"),
    swaps("a static method", "class Config:\n    @staticmethod\n    def size(x): return x + 1\nconfig = Config()",
          "config.size(x)", ("x + 1", "x + 2"), "Config.size", "staticmethod(lambda x: 0)"),
    reads("which attribute operator.attrgetter gets", "import operator\nclass Config:\n    tile = 1\n    warps = 4\n"
          "get = operator.attrgetter('tile')", "get(Config)", ("('tile')", "('warps')"), "get = operator.attrgetter('warps')",
          "get = operator.attrgetter('tile')", refuses=True),
    reads("a method by operator.methodcaller", "import operator\nclass Config:\n    def size(self, x): return x + 1\n"
          "config = Config()\ncall = operator.methodcaller('size', 1)\nkept = Config.size", "call(config)",
          ("x + 1", "x + 2"), "Config.size = lambda self, x: 0", "Config.size = kept", refuses=True),
    reads("the object of a weak reference", "import weakref\nclass Config: pass\nconfig = Config()\nconfig.tile = 1\n"
          "ref = weakref.ref(config)", "ref().tile", ("tile = 1", "tile = 2"), "config.tile = 2", "config.tile = 1",
          refuses=True),
    reads("what an object in a cycle holds", "class Node: pass\na, b = Node(), Node()\na.next, b.next = b, a\nb.tile = 1",
          "a.next.tile", ("tile = 1", "tile = 2"), "b.tile = 2", "b.tile = 1"),
    reads("a typed dict's keys", "from typing import TypedDict\nclass Config(TypedDict):\n    tile: int",
          "list(Config.__annotations__)", ("tile: int", "warps: int"),
          "Config.__annotations__['warps'] = int", "del Config.__annotations__['warps']"),
]  # fmt: skip

ROWS = [*DESCRIPTORS, *BASES, *PROTOCOLS, *DATACLASSES]
