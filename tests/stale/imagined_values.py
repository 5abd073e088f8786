"""Imagined rows: values of every kind that Python has, and what tells two of them apart."""

from __future__ import annotations

from tests.stale.imagined_row import reads
from tests.stale.row import Row


def value(
    what: str, first: str, second: str, expression: str = "repr(VALUE)", imports: str = "", **more: object
) -> Row:
    """A global that is `first`, is edited to `second`, and is set to it."""
    setup = f"{imports}\nVALUE = {first}"
    edit = (f"VALUE = {first}", f"VALUE = {second}")
    return reads(what, setup, expression, edit, f"VALUE = {second}", f"VALUE = {first}", **more)


_COLLECTIONS = "from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque"

PLAIN = [
    value("the sign of a number that is none", "float('nan')", "-float('nan')", "math.copysign(1, VALUE)", "import math"),
    value("a number in a large integer", "10 ** 5000 + 1", "10 ** 5000 + 2", "VALUE % 1000"),
    value("a float that is a set's member", "{1}", "{1.0}"),
    value("a complex number's imaginary zero", "complex(1, 0.0)", "complex(1, -0.0)"),
    value("a set that becomes frozen", "{1, 2}", "frozenset({1, 2})"),
    value("the order of a dict", "{'a': 1, 'b': 2}", "{'b': 2, 'a': 1}"),
    value("bytes that become a bytearray", "b'ab'", "bytearray(b'ab')", refuses=True),
    reads("a byte under a memoryview", "DATA = bytearray(b'ab')\nVALUE = memoryview(DATA)", "VALUE.tobytes()",
          ("b'ab'", "b'ac'"), "DATA[1] = 99", "DATA[1] = 98", refuses=True),
    value("the end of a range that has the same numbers", "range(0, 9, 2)", "range(0, 10, 2)", refuses=True),
    value("a slice", "slice(1, 2)", "slice(1, None)", refuses=True),
    value("an ellipsis", "(1, ...)", "(1, None)", refuses=True),
    value("a value that is not implemented", "NotImplemented", "None", refuses=True),
    value("which exception", "KeyError", "ValueError"),
    value("a union of types", "int | str", "int | None", refuses=True),
    reads("an item deep in a list", "VALUE = [1]\nfor _ in range(50): VALUE = [VALUE]", "VALUE", ("[1]", "[2]"),
          "deep = VALUE\nwhile isinstance(deep[0], list): deep = deep[0]\ndeep[0] = 2", "deep[0] = 1", refuses=True),
    reads("a list that contains itself", "VALUE = [1]\nVALUE.append(VALUE)", "VALUE[1][1][0]", ("= [1]", "= [2]"), "VALUE[0] = 2",
          "VALUE[0] = 1", refuses=True),
    reads("whether two names hold one list", "A = [1]\nB = A", "A is B", ("B = A", "B = [1]"), "B = [1]", "B = A"),
    reads("which two of three lists are one", "A = [1]\nB = [1]\nVALUE = [A, A, B]",
          "(VALUE[0] is VALUE[1], VALUE[1] is VALUE[2])", ("[A, A, B]", "[A, B, B]"), "VALUE[1] = B", "VALUE[1] = A"),
]  # fmt: skip

SUBCLASSES = [
    reads("an attribute of a number of a class of its own", "class Tile(int): pass\nVALUE = Tile(1)\nVALUE.unit = 'b'",
          "VALUE.unit", ("'b'", "'w'"), "VALUE.unit = 'w'", "VALUE.unit = 'b'", refuses=True),
    reads("how a dict of a class of its own answers for missing keys", "class Table(dict):\n"
          "    def __missing__(self, key): return key + 1\nVALUE = Table()\nkept = Table.__missing__", "VALUE[x]",
          ("key + 1", "key + 2"), "Table.__missing__ = lambda self, key: 0", "Table.__missing__ = kept", refuses=True),
    reads("how a list of a class of its own sums", "class Sizes(list):\n    def total(self): return sum(self) + 1\n"
          "VALUE = Sizes([1])\nkept = Sizes.total", "VALUE.total()", ("+ 1", "+ 2"), "Sizes.total = lambda self: 0",
          "Sizes.total = kept", refuses=True),
    reads("an attribute of an exception", "VALUE = ValueError('a')\nVALUE.code = 1", "VALUE.code", ("code = 1", "code = 2"),
          "VALUE.code = 2", "VALUE.code = 1", refuses=True),
]  # fmt: skip

_PATH_ = "from pathlib import Path, PurePosixPath, PureWindowsPath"
_TIME = "from datetime import date, datetime, timedelta, timezone"

LIBRARY = [
    value("what a default dict makes", "defaultdict(int)", "defaultdict(list)", "VALUE.default_factory()", _COLLECTIONS),
    value("the order of an ordered dict", "OrderedDict(a=1, b=2)", "OrderedDict(b=2, a=1)", imports=_COLLECTIONS),
    value("a counter's count", "Counter(a=1)", "Counter(a=2)", imports=_COLLECTIONS),
    reads("an item of a deque", "from collections import deque\nVALUE = deque([1, 2])", "VALUE", ("[1, 2]", "[2, 1]"),
          "VALUE.rotate()", "VALUE.rotate()", refuses=True),
    reads("a map of a chain map", "from collections import ChainMap\nOUTER = {'a': 1}\nVALUE = ChainMap({}, OUTER)", "VALUE['a']",
          ("'a': 1", "'a': 2"), "OUTER['a'] = 2", "OUTER['a'] = 1"),
    reads("what is in a user's dict", "from collections import UserDict\nVALUE = UserDict(a=1)", "VALUE['a']", ("a=1", "a=2"),
          "VALUE['a'] = 2", "VALUE['a'] = 1"),
    reads("a view of a dict", "UNDER = {'a': 1}\nVALUE = UNDER.values()", "list(VALUE)", ("'a': 1", "'a': 2"),
          "UNDER['a'] = 2", "UNDER['a'] = 1", refuses=True),
    value("the type code of an array", "array('i', [1])", "array('l', [1])", imports="from array import array",
          refuses=True),
    value("a compiled pattern's flags", "re.compile('a')", "re.compile('a', re.I)", "bool(VALUE.match('A'))", "import re",
          refuses=True),
    value("a moment's fold", "datetime(2026, 1, 1)", "datetime(2026, 1, 1, fold=1)", "VALUE.fold", _TIME, refuses=True),
    value("the zeros of a decimal", "Decimal('1.0')", "Decimal('1.00')", imports="from decimal import Decimal",
          refuses=True),
    value("a fraction", "Fraction(1, 3)", "Fraction(2, 3)", imports="from fractions import Fraction", refuses=True),
    value("a path", "Path('a/b')", "Path('a', 'c')", "VALUE.name", _PATH_, refuses=True),
    value("a path's flavour", "PurePosixPath('a')", "PureWindowsPath('a')", "type(VALUE).__name__", _PATH_, refuses=True),
    value("an address", "ip_address('1.1.1.1')", "ip_address('1.1.1.2')", imports="from ipaddress import ip_address",
          refuses=True),
    value("the format of a struct", "Struct('<i')", "Struct('>i')", "VALUE.pack(1)", "from struct import Struct",
          refuses=True),
    value("what an item getter gets", "itemgetter(0)", "itemgetter(1)", "VALUE([1, 2])", "from operator import itemgetter",
          refuses=True),
    value("the text in a memory file", "io.StringIO('a')", "io.StringIO('b')", "VALUE.getvalue()", "import io", refuses=True),
    reads("a field of a C structure", "import ctypes\nclass Tile(ctypes.Structure):\n    _fields_ = [('n', ctypes.c_int)]\n"
          "VALUE = Tile(1)", "VALUE.n", ("Tile(1)", "Tile(2)"), "VALUE.n = 2", "VALUE.n = 1", refuses=True),
    value("a code object", "compile('1 + 1', 'f', 'eval')", "compile('1 + 2', 'f', 'eval')", "eval(VALUE)", refuses=True),
    value("a syntax tree", "ast.parse('1 + 1')", "ast.parse('1 + 2')", "ast.dump(VALUE)", "import ast", refuses=True),
    reads("the level of a logger", "import logging\nlog = logging.getLogger('imagined')\nlog.setLevel(10)",
          "log.isEnabledFor(20)", ("setLevel(10)", "setLevel(30)"), "log.setLevel(30)", "log.setLevel(10)", refuses=True),
]  # fmt: skip

_NUMPY = "import numpy"

ARRAYS = [
    value("an array's order of bytes", "numpy.ones(1, '<i4')", "numpy.ones(1, '>i4')", "VALUE.tobytes()", _NUMPY),
    value("an array of texts", "numpy.array(['a', 'b'])", "numpy.array(['a', 'c'])", imports=_NUMPY),
    value("an array of objects", "numpy.array([[1], None], object)", "numpy.array([[2], None], object)", imports=_NUMPY,
          refuses=True),
    value("a mask of an array", "ma.array([1, 2], mask=[0, 1])", "ma.array([1, 2], mask=[1, 0])", "VALUE.filled(0).tolist()",
          "from numpy import ma", refuses=True),
    value("an array's scalar's type", "numpy.float32(1)", "numpy.float64(1)", imports=_NUMPY),
    value("an array's scalar", "numpy.float32(0.5)", "numpy.float32(0.25)", imports=_NUMPY),
    value("a type of numpy's", "numpy.dtype('f4')", "numpy.dtype('f8')", imports=_NUMPY),
    value("a function of numpy's", "numpy.add", "numpy.subtract", "VALUE(x, 1)", _NUMPY, refuses=True),
]  # fmt: skip

ROWS = [*PLAIN, *SUBCLASSES, *LIBRARY, *ARRAYS]
