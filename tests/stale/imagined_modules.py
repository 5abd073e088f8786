"""Imagined rows: modules, and all the ways to import them."""

from __future__ import annotations

from tests.stale.imagined_row import does, reads

_CONSTS = {"consts.py": "TILE = 1\n"}
_TILE = (("TILE = 1", "TILE = 2"), "consts.TILE = 2", "consts.TILE = 1")
_STAR = {"kit/__init__.py": "from . import *\nfrom . import far\n__all__ = ['far']\n", "kit/far.py": "N = 1\n"}
_LAZY = {"lazy.py": "def __getattr__(name):\n    if name == 'TILE': return 1\n    raise AttributeError(name)\n"}
_PLUGIN = {"registry.py": "RULES = {}\n",
           "plugin.py": "from .registry import RULES\n\ndef rule(x): return x + 1\n\nRULES['rule'] = rule\n"}  # fmt: skip
_PLUGGED = "kept = registry.RULES['rule']\nregistry.RULES['rule'] = lambda x: 0"
_PATHED = """
import importlib.util
from pathlib import Path

def load(name, file):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(file))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""

_CONFIG = """
TILE = 1
class Config:
    def text(self): return self.tile
config = Config()
config.tile = TILE
TABLE = {"c": config}
def held(c): return c.tile
"""
_OF_CONFIG = (
    ("an attribute by getattr", "getattr(config, 'tile')"), ("an attribute by vars()", "vars(config)['tile']"),
    ("an attribute of an object that a helper is given", "held(config)"), ("an attribute under a walrus", "(c := config).tile"),
    ("an attribute of an object in a tuple", "[c.tile for c in (config,)]"),
    ("an attribute of an object in a table", "TABLE['c'].tile"), ("a method of an object in a table", "TABLE['c'].text()"),
    ("an attribute of an object that map goes through", "[*map(held, [config])]"),
)  # fmt: skip

NAMES = [
    reads("a module of a package that imports all of itself", "from .kit import *\nfrom . import kit", "far.N",
          ("N = 1", "N = 2"), "far.N = 2", "far.N = 1", files=_STAR),
    reads("a module under an alias of an alias", "from . import consts as c\nd = c\nclass Names:\n    m = d", "Names.m.TILE",
          ("TILE = 1", "TILE = 2"), "c.TILE = 2", "c.TILE = 1", files=_CONSTS),
    *(reads(f"{what} in a helper of a module in a list", "from . import consts\nMODULES = [consts]",
            "[m.size() for m in MODULES]", ("TILE = 1", "TILE = 2"), "consts.config.tile = 2", "consts.config.tile = 1",
            files={"consts.py": f"{_CONFIG}def size(): return {expression}\n"}) for what, expression in _OF_CONFIG),
    reads("a module's constants by dir()", "from . import consts", "[n for n in dir(consts) if n.isupper()]",
          ("TILE = 1", "WARPS = 1"), "consts.MORE = 2", "del consts.MORE", files=_CONSTS, refuses=True),
    reads("a module by sys.modules", "import sys\nfrom . import consts", "sys.modules[consts.__name__].TILE", *_TILE,
          files=_CONSTS, refuses=True),
    reads("what a module's __getattr__ reads", "from . import lazy", "lazy.TILE", ("N = 1", "N = 2"), "lazy.N = 2",
          "lazy.N = 1", files={"lazy.py": "N = 1\ndef __getattr__(name):\n    return N\n"}),
    reads("a name from a module's __getattr__ that a helper imports",
          "from . import lazy\nkept = lazy.__getattr__\ndef helper():\n    from .lazy import TILE\n    return TILE", "helper()",
          ("return 1", "return 2"), "lazy.__getattr__ = lambda name: 3", "lazy.__getattr__ = kept", files=_LAZY),
    reads("a property of a module's own class", "from . import odd\nkept = vars(type(odd))['tile']", "odd.tile",
          ("return 1", "return 2"), "type(odd).tile = property(lambda self: 3)", "type(odd).tile = kept",
          files={"odd.py": "import sys, types\nclass Odd(types.ModuleType):\n    @property\n    def tile(self): return 1\n"
                           "sys.modules[__name__].__class__ = Odd\n"}),
    reads("an object that stands for a module in sys.modules", "from . import odd", "odd.tile", ("tile = 1", "tile = 2"),
          "odd.tile = 2", "odd.tile = 1",
          files={"odd.py": "import sys\nclass Odd: pass\nself = Odd()\nself.tile = 1\nsys.modules[__name__] = self\n"}),
]  # fmt: skip

EFFECTS = [
    reads("a table that a plugin fills whose name a loop computes", "import importlib, pkgutil\nfrom . import registry, plugins\n"
          "for found in pkgutil.iter_modules(plugins.__path__):\n"
          "    importlib.import_module('.' + found.name, plugins.__name__)", "registry.RULES['rule'](x)", ("x + 1", "x + 2"),
          _PLUGGED, "registry.RULES['rule'] = kept",
          files={"registry.py": "RULES = {}\n", "plugins/__init__.py": "",
                 "plugins/one.py": _PLUGIN["plugin.py"].replace("from .reg", "from ..reg")}),
    reads("a module that is replaced in its package", "import types\nfrom . import pkg\nfrom .pkg import consts",
          "pkg.consts.TILE", ("TILE = 1", "TILE = 2"), "pkg.consts = types.SimpleNamespace(TILE=3)", "pkg.consts = consts",
          files={"pkg/__init__.py": "", "pkg/consts.py": "TILE = 1\n"}),
    reads("a function of Python's that the program replaces", "import colorsys\nkept = colorsys.rgb_to_yiq",
          "colorsys.rgb_to_yiq(1, 1, 1)[0]", ("kept = colorsys.rgb_to_yiq",
          "kept = colorsys.rgb_to_yiq\ncolorsys.rgb_to_yiq = lambda *c: c"), "colorsys.rgb_to_yiq = lambda *c: [7]",
          "colorsys.rgb_to_yiq = kept"),
    reads("a constant of Python's that the program sets", "import colorsys\nkept = colorsys.ONE_THIRD", "colorsys.ONE_THIRD",
          ("kept = colorsys.ONE_THIRD", "kept = colorsys.ONE_THIRD\ncolorsys.ONE_THIRD = 7"), "colorsys.ONE_THIRD = 8",
          "colorsys.ONE_THIRD = kept"),
    reads("a constant of Python's that a function of Python's reads", "import colorsys\nkept = colorsys.TWO_THIRD",
          "colorsys.hls_to_rgb(0.5, 0.4, 0.2)", ("kept = colorsys.TWO_THIRD",
          "kept = colorsys.TWO_THIRD\ncolorsys.TWO_THIRD = 0.1"), "colorsys.TWO_THIRD = 0.2", "colorsys.TWO_THIRD = kept"),
    reads("a method of Python's class that the program replaces", "import string\nkept = string.Formatter.get_value",
          "string.Formatter().format('{}', x)", ("kept = string.Formatter.get_value",
          "kept = string.Formatter.get_value\nstring.Formatter.get_value = lambda *a: 7"),
          "string.Formatter.get_value = lambda *a: 8", "string.Formatter.get_value = kept"),
]  # fmt: skip

_SIZES = {"one.py": "N = 1\ndef size(): return N\n", "two.py": "def size(): return 0\n"}
_ONE = (("N = 1", "N = 2"), "from . import one\none.N = 2", "one.N = 1")

INSIDE = [
    reads("a module that is imported where another one is missing", "try:\n    from .missing import size\n"
          "except ImportError:\n    from .one import size\n", "size()", *_ONE, files=_SIZES),
    does("which branch of the function imports", "FAST = True",
         "if FAST:\n    from .one import size\nelse:\n    from .two import size\nout = size()", ("FAST = True", "FAST = False"),
         "FAST = False", "FAST = True", files=_SIZES),
    does("a package that is imported by its whole name in the function", "",
         "import row_a_package_that_is_imported_by_its_whole_name_in_the_function.pkg.deep as m\nout = m.N", ("N = 1", "N = 2"),
         "from .pkg import deep\ndeep.N = 2", "deep.N = 1", files={"pkg/__init__.py": "", "pkg/deep.py": "N = 1\n"}),
    does("a module that a constant name imports in the function", "import importlib",
         "out = importlib.import_module('.one', __package__).size()", *_ONE, files=_SIZES, refuses=True),
    does("which module a computed name imports", "import importlib\nNAME = 'one'",
         "out = importlib.import_module('.' + NAME, __package__).size()", ("NAME = 'one'", "NAME = 'two'"), "NAME = 'two'",
         "NAME = 'one'", files=_SIZES, refuses=True),
    does("a module that __import__ imports", "", "out = __import__('one', globals(), None, ['size'], 1).size()", *_ONE,
         files=_SIZES, refuses=True),
    does("a module that a method imports within itself", "class Config:\n    def size(self):\n        from . import one\n"
         "        return one.size()", "out = Config().size()", *_ONE, files=_SIZES),
    does("a module that appears where an import of the function failed", "",
         "try:\n    from .missing import size\nexcept ImportError:\n    from .two import size\nout = size()", None,
         "import importlib\nimportlib.invalidate_caches()", "import sys\nsys.modules.pop(__package__ + '.missing', None)\n"
         "importlib.invalidate_caches()", files=_SIZES, added={"missing.py": "def size(): return 9\n"}, edits_live=True),
    does("a file that is loaded by its path in the function", _PATHED, "out = load('loaded', 'one.py').size()",
         ("N = 1", "N = 2"), "", "", files=_SIZES, edits_live=True, refuses=True),
    reads("a class that says it is of Python's module", "class Config:\n    __module__ = 'collections'\n"
          "    def size(self): return 1\nkept = Config.size", "Config().size()", ("return 1", "return 2"),
          "Config.size = lambda self: 3", "Config.size = kept"),
]  # fmt: skip

ROWS = [*NAMES, *EFFECTS, *INSIDE]
