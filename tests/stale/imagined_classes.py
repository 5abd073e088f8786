"""Imagined rows: classes and what they are made of, objects and what their classes do for them."""

from __future__ import annotations

from tests.stale.imagined_row import does, reads, swaps
from tests.stale.row import Row

_BASE = {"base.py": "class Base:\n    k = 2\n    def size(self, x): return x * self.k\n"}

DESCRIPTORS = [
    swaps("the getter of a descriptor", "class Tile:\n    def __get__(self, held, owner): return 1\n"
          "class Config:\n    tile = Tile()\nconfig = Config()", "config.tile", ("return 1", "return 2"),
          "Tile.__get__", "lambda self, held, owner: 3"),
    reads("what a descriptor holds", "class Tile:\n    def __init__(self, n): self.n = n\n"
          "    def __get__(self, held, owner): return self.n\nclass Config:\n    tile = Tile(1)\nconfig = Config()",
          "config.tile", ("Tile(1)", "Tile(2)"), "vars(Config)['tile'].n = 2", "vars(Config)['tile'].n = 1"),
    does("what a property's setter makes of what it is given", "K = 2\nclass Config:\n    @property\n"
         "    def tile(self): return self._tile\n    @tile.setter\n    def tile(self, n): self._tile = n * K",
         "config = Config()\nconfig.tile = x\nout = config.tile", ("n * K", "n * K + 1"), "K = 5", "K = 2"),
    reads("the name that __set_name__ has noted", "class Field:\n    def __set_name__(self, owner, name): self.name = name\n"
          "    def __get__(self, held, owner): return self.name\nclass Config:\n    tile = Field()\nconfig = Config()",
          "config.tile", ("self.name = name", "self.name = name + '_'"), "vars(Config)['tile'].name = 'other'",
          "vars(Config)['tile'].name = 'tile'"),
    reads("what a cached property of a new object computes", "N = 1\nclass Config:\n    @functools.cached_property\n"
          "    def tile(self): return N", "Config().tile", ("N = 1", "N = 2"), "N = 2", "N = 1"),
    reads("what a cached property of a global object is computed from", "class Config:\n    def __init__(self): self.n = 1\n"
          "    @functools.cached_property\n    def tile(self): return self.n\nconfig = Config()", "config.tile",
          ("self.n = 1", "self.n = 2"), "config.n = 2\nvars(config).pop('tile', None)",
          "config.n = 1\nvars(config).pop('tile', None)"),
    reads("what a slot holds", "class Config:\n    __slots__ = ('tile',)\nconfig = Config()\nconfig.tile = 1", "config.tile",
          ("tile = 1", "tile = 2"), "config.tile = 2", "config.tile = 1"),
    reads("what a slot of a base class holds", "class Base:\n    __slots__ = ('tile',)\nclass Config(Base):\n"
          "    __slots__ = ('n',)\nconfig = Config()\nconfig.n = 5\nconfig.tile = [1]", "(config.n, config.tile)",
          ("[1]", "[2]"), "config.tile[0] = 2", "config.tile[0] = 1"),
    reads("a private attribute with a mangled name", "class Config:\n    def __init__(self): self.__tile = 1\n"
          "    def size(self): return self.__tile\nconfig = Config()", "config.size()", ("__tile = 1", "__tile = 2"),
          "config._Config__tile = 2", "config._Config__tile = 1"),
]  # fmt: skip

BASES = [
    swaps("a method of a base class in another file", "from .base import Base\nclass Config(Base): pass", "Config().size(x)",
          ("x * self.k", "x + self.k"), "Base.size", "lambda self, x: 0", files=_BASE),
    reads("an attribute of a base class in another file that super() reads", "from .base import Base\nclass Config(Base):\n"
          "    def size(self, x): return -super().size(x) * super().k", "Config().size(x)", ("k = 2", "k = 3"),
          "Base.k = 3", "Base.k = 2", files=_BASE),
    swaps("a classmethod that is reached by super() without arguments", "class Base:\n    @classmethod\n"
          "    def size(cls): return 1\nclass Config(Base):\n    @classmethod\n    def size(cls): return super().size() + 10",
          "Config.size()", ("return 1\n", "return 2\n"), "Base.size", "classmethod(lambda cls: 3)"),
    reads("which of two mixins comes first", "class Fast:\n    def size(self): return 1\nclass Small:\n"
          "    def size(self): return 2\nclass Config(Fast, Small): pass", "Config().size()",
          ("(Fast, Small)", "(Small, Fast)"), "Config.__bases__ = (Small, Fast)", "Config.__bases__ = (Fast, Small)"),
    swaps("a method of a mixin that calls a method of the class", "class Mixin:\n    def size(self): return self.unit() * 2\n"
          "class Config(Mixin):\n    def unit(self): return 1", "Config().size()", ("return 1", "return 5"), "Config.unit",
          "lambda self: 7"),
    swaps("a method that an abstract one is implemented by", "import abc\nclass Base(abc.ABC):\n    @abc.abstractmethod\n"
          "    def unit(self): ...\n    def size(self): return self.unit()\nclass Config(Base):\n    def unit(self): return 1\n"
          "config: Base = Config()", "config.size()", ("return 1", "return 5"), "Config.unit", "lambda self: 7"),
    reads("what __init_subclass__ puts on a subclass", "class Base:\n    def __init_subclass__(cls, n=1): cls.tile = n\n"
          "class Config(Base, n=4): pass", "Config.tile", ("n=4", "n=5"), "Config.tile = 5", "Config.tile = 4"),
    reads("a subclass that registers itself", "REGISTRY = {}\nclass Base:\n    def __init_subclass__(cls):\n"
          "        REGISTRY[cls.__name__] = cls\nclass One(Base):\n    def size(self): return 1\nkept = One.size",
          "REGISTRY['One']().size()", ("return 1", "return 2"), "One.size = lambda self: 3", "One.size = kept"),
    reads("the subclasses of a class", "class Base: pass\nclass One(Base): tile = 1\nkept = []",
          "sorted(c.tile for c in Base.__subclasses__())", ("tile = 1", "tile = 2"),
          "class Two(Base): tile = 5\nkept.append(Two)", "import gc\nkept.clear()\ndel Two\ngc.collect()", refuses=True),
    reads("what a class's own subscript makes", "class Vector:\n    def __class_getitem__(cls, n): return n * cls.k\n    k = 2",
          "Vector[x]", ("k = 2", "k = 3"), "Vector.k = 3", "Vector.k = 2"),
    reads("an argument of a generic alias", "from typing import get_args\nTYPE = list[int]", "get_args(TYPE)",
          ("list[int]", "list[str]"), "TYPE = list[str]", "TYPE = list[int]", refuses=True),
    swaps("what a metaclass's __prepare__ puts in a class", "class Meta(type):\n    @classmethod\n"
          "    def __prepare__(meta, name, bases): return {'tile': 1}\nclass Config(metaclass=Meta): pass", "Config.tile",
          ("'tile': 1", "'tile': 2"), "Config.tile", "3"),
    swaps("how a metaclass answers for attributes that are not there", "class Meta(type):\n"
          "    def __getattr__(cls, name): return name + '1'\nclass Config(metaclass=Meta): pass", "Config.tile",
          ("'1'", "'2'"), "Meta.__getattr__", "lambda cls, name: 3", refuses=True),
    swaps("how a metaclass indexes its class", "class Meta(type):\n    def __getitem__(cls, n): return n + 1\n"
          "class Config(metaclass=Meta): pass", "Config[x]", ("n + 1", "n + 2"), "Meta.__getitem__", "lambda cls, n: 0"),
    swaps("a method of a class that is nested in a class", "class Outer:\n    class Inner:\n        def size(self): return 1",
          "Outer.Inner().size()", ("return 1", "return 2"), "Outer.Inner.size", "lambda self: 3"),
    reads("a class that a function makes", "def make(n):\n    class Config:\n        def size(self): return n\n"
          "    return Config\nConfig = make(1)", "Config().size()", ("make(1)", "make(2)"), "Config = make(2)",
          "Config = make(1)"),
    reads("a class that type() makes", "Config = type('Config', (), {'tile': 1})", "Config().tile", ("'tile': 1", "'tile': 2"),
          "Config.tile = 2", "Config.tile = 1"),
    reads("a constant that a class's body computes", "UNIT = 2\nclass Config:\n    tile = UNIT * 8", "Config.tile",
          ("UNIT = 2", "UNIT = 3"), "Config.tile = 24", "Config.tile = 16"),
    reads("an attribute that a class decorator puts on it", "def tiled(n):\n    def decorate(cls):\n        cls.tile = n\n"
          "        return cls\n    return decorate\n@tiled(1)\nclass Config: pass", "Config.tile", ("tiled(1)", "tiled(2)"),
          "Config.tile = 2", "Config.tile = 1"),
    reads("an attribute that is deleted, which a base class has too", "class Base: tile = 1\nclass Config(Base): pass\n"
          "Config.tile = 2", "Config().tile", ("Config.tile = 2", "Config.tile = 3"), "del Config.tile", "Config.tile = 2"),
    reads("an attribute of an object that hides its class's", "class Config:\n    tile = 1\nconfig = Config()", "config.tile",
          ("config = Config()", "config = Config()\nconfig.tile = 2"), "config.tile = 2", "del config.tile"),
    reads("the name of a class", "class One: pass\nclass Two: pass\nobject_ = One()", "type(object_).__name__",
          ("= One()", "= Two()"), "object_.__class__ = Two", "object_.__class__ = One", refuses=True),
]  # fmt: skip


def _protocol(what: str, method: str, old: str, new: str, expression: str, **more: object) -> Row:
    """What a special method of a global object's class does where no one names it."""
    setup = f"class Config:\n    def {method}: return {old}\nconfig = Config()"
    name, arguments = method.rstrip(")").split("(")
    return swaps(what, setup, expression, (f"return {old}", f"return {new}"), f"Config.{name}",
                 f"lambda {arguments}: {new}", **more)  # fmt: skip


PROTOCOLS = [
    _protocol("how an object adds", "__add__(self, n)", "n + 1", "n + 2", "config + x", refuses=True),
    _protocol("how an object is compared", "__lt__(self, n)", "True", "False", "config < x", refuses=True),
    _protocol("how an object equals", "__eq__(self, n)", "True", "False", "config == x", refuses=True),
    _protocol("how an object is a number", "__index__(self)", "1", "2", "list(range(5))[config]", refuses=True),
    _protocol("whether an object is true", "__bool__(self)", "True", "False", "'fast' if config else 'slow'", refuses=True),
    _protocol("what an object contains", "__contains__(self, n)", "True", "False", "x in config", refuses=True),
    _protocol("what an object yields", "__iter__(self)", "iter([1])", "iter([2])", "[*config]", refuses=True),
    _protocol("what an object's items are", "__getitem__(self, n)", "n + 1", "n + 2", "config[x]", refuses=True),
    _protocol("how an object is formatted", "__format__(self, spec)", "spec + '1'", "spec + '2'", "f'{config:tile}'",
              refuses=True),
    _protocol("how an object answers for attributes that are not there", "__getattr__(self, name)", "name + '1'",
              "name + '2'", "config.tile", refuses=True),
    _protocol("how an object answers for all attributes", "__getattribute__(self, name)", "name + '1'", "name + '2'",
              "config.tile", refuses=True),
    _protocol("what calling an object does", "__call__(self, n)", "n + 1", "n + 2", "config(x)"),
    does("what a context manager enters", "class Tiles:\n    def __enter__(self): return 1\n    def __exit__(self, *e): pass\n"
         "kept = Tiles.__enter__", "with Tiles() as tile:\n    out = tile", ("return 1", "return 2"),
         "Tiles.__enter__ = lambda self: 3", "Tiles.__enter__ = kept"),
    does("whether a context manager swallows an error", "class Quiet:\n    def __exit__(self, *e): return True\n"
         "    def __enter__(self): pass\nkept = Quiet.__exit__", "out = 1\ntry:\n    with Quiet():\n        raise KeyError\n"
         "except KeyError:\n    out = 2", ("return True", "return False"), "Quiet.__exit__ = lambda self, *e: None",
         "Quiet.__exit__ = kept"),
    does("how a class makes its objects", "class Config:\n    def __new__(cls, n):\n        self = super().__new__(cls)\n"
         "        self.tile = n + 1\n        return self\nkept = Config.__new__", "out = Config(x).tile", ("n + 1", "n + 2"),
         "def new(cls, n):\n    return SimpleNamespace(tile=0)\nConfig.__new__ = new", "Config.__new__ = kept"),
    swaps("how an object matches a pattern", "class Point:\n    __match_args__ = ('a', 'b')\n    a, b = 1, 2\n"
          "def first(p):\n    match p:\n        case Point(n): return n", "first(Point())", ("('a', 'b')", "('b', 'a')"),
          "Point.__match_args__", "('b',)"),
]  # fmt: skip

DATACLASSES = [
    reads("a default factory that is a lambda", "from dataclasses import field\n@dataclass\nclass Config:\n"
          "    sizes: list = field(default_factory=lambda: [1])", "Config().sizes", ("[1]", "[2]"),
          "kept = Config.__init__\nConfig.__init__ = lambda self: setattr(self, 'sizes', [3])", "Config.__init__ = kept"),
    reads("a global of a default factory", "from dataclasses import field\nN = 1\ndef sizes(): return [N]\n@dataclass\n"
          "class Config:\n    sizes: list = field(default_factory=sizes)", "Config().sizes", ("N = 1", "N = 2"), "N = 2",
          "N = 1"),
    reads("a default of a dataclass's field", "@dataclass\nclass Config:\n    tile: int = 1", "Config().tile",
          ("int = 1", "int = 2"), "Config.__init__.__defaults__ = (2,)", "Config.__init__.__defaults__ = (1,)"),
    swaps("what a dataclass does after its init", "@dataclass\nclass Config:\n    tile: int = 1\n"
          "    def __post_init__(self): self.tile *= 2", "Config().tile", ("*= 2", "*= 3"), "Config.__post_init__",
          "lambda self: None"),
    reads("an attribute that is put on a dataclass's object beside its fields", "@dataclass\nclass Config:\n    tile: int = 1\n"
          "config = Config()\nconfig.extra = 5", "config.extra", ("extra = 5", "extra = 6"), "config.extra = 6",
          "config.extra = 5"),
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
    reads("a field that is not compared", "from dataclasses import field\n@dataclass\nclass Config:\n"
          "    tile: int = field(default=1, compare=False, repr=False)\nconfig = Config(4)", "config.tile",
          ("Config(4)", "Config(5)"), "config.tile = 5", "config.tile = 4"),
    reads("an argument that says it equals whatever", "class Config:\n    def __init__(self, n): self.n = n\n"
          "    def __eq__(self, other): return True\n    def __hash__(self): return 1\nconfig = Config(1)", "config.n",
          ("Config(1)", "Config(2)"), "config = Config(2)", "config = Config(1)"),
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
    reads("the attribute that a class method reads of its class", "class Config:\n    k = 1\n    @classmethod\n"
          "    def size(cls): return cls.k\nsize = Config.size", "size()", ("k = 1", "k = 2"), "Config.k = 2", "Config.k = 1"),
    reads("an attribute that setattr makes", "class Config: pass\nconfig = Config()\nsetattr(config, 'ti' + 'le', 1)",
          "config.tile", ("'le', 1", "'le', 2"), "config.tile = 2", "config.tile = 1"),
    reads("an attribute by getattr with a constant name", "class Config: pass\nconfig = Config()\nconfig.tile = 1",
          "getattr(config, 'tile')", ("tile = 1", "tile = 2"), "config.tile = 2", "config.tile = 1", refuses=True),
    reads("a class attribute by getattr with a loop's name", "class Config:\n    tile = 1\n    warps = 4",
          "[getattr(Config, n) for n in ('tile', 'warps')]", ("warps = 4", "warps = 8"), "Config.warps = 8",
          "Config.warps = 4"),
    reads("which attribute operator.attrgetter gets", "import operator\nclass Config:\n    tile = 1\n    warps = 4\n"
          "get = operator.attrgetter('tile')", "get(Config)", ("('tile')", "('warps')"), "get = operator.attrgetter('warps')",
          "get = operator.attrgetter('tile')", refuses=True),
    reads("a method by operator.methodcaller", "import operator\nclass Config:\n    def size(self, x): return x + 1\n"
          "config = Config()\ncall = operator.methodcaller('size', 1)\nkept = Config.size", "call(config)",
          ("x + 1", "x + 2"), "Config.size = lambda self, x: 0", "Config.size = kept", refuses=True),
    reads("the object of a weak reference", "import weakref\nclass Config: pass\nconfig = Config()\nconfig.tile = 1\n"
          "ref = weakref.ref(config)", "ref().tile", ("tile = 1", "tile = 2"), "config.tile = 2", "config.tile = 1",
          refuses=True),
    reads("an object of a helper's class that a helper makes", "class Config:\n    def __init__(self): self.tile = TILE\n"
          "TILE = 1\ndef make(): return Config()", "make().tile", ("TILE = 1", "TILE = 2"), "TILE = 2", "TILE = 1"),
    reads("what an object in a cycle holds", "class Node: pass\na, b = Node(), Node()\na.next, b.next = b, a\nb.tile = 1",
          "a.next.tile", ("tile = 1", "tile = 2"), "b.tile = 2", "b.tile = 1"),
    reads("an exception's class in a table", "class Small(Exception):\n    code = 1\nTABLE = {'small': Small}",
          "TABLE['small'].code", ("code = 1", "code = 2"), "Small.code = 2", "Small.code = 1"),
    reads("a typed dict's keys", "from typing import TypedDict\nclass Config(TypedDict):\n    tile: int",
          "list(Config.__annotations__)", ("tile: int", "warps: int"),
          "Config.__annotations__['warps'] = int", "del Config.__annotations__['warps']"),
]  # fmt: skip

ROWS = [*DESCRIPTORS, *BASES, *PROTOCOLS, *DATACLASSES]
