"""Imagined rows: the environment in all its spellings, functions within functions, tools that are scripts, trees, C code."""

from __future__ import annotations

import shutil

from tests.stale.imagined_row import does, reads
from tests.stale.row import Row

_FLAG = {"SUBJECT_FLAG": ("1", "2")}


def spelled(what: str, expression: str, setup: str = "", **more: object) -> Row:
    """A variable of the environment that `expression` reads."""
    return reads(what, f"import os\n{setup}", expression, None, "", "", environ=_FLAG, **more)


def asks(what: str, body: str, setup: str = "", **more: object) -> Row:
    return does(what, f"import os\n{setup}", body, None, "", "", environ=_FLAG, **more)


ENVIRONMENT = [
    asks("a variable of an environment that a walrus names", 'if (e := os.environ):\n    out = e.get("SUBJECT_FLAG")'),
    asks("a variable that a match statement takes apart", 'match os.environ:\n    case {"SUBJECT_FLAG": out}: pass'),
    asks("a variable by a name that is imported in the function", 'from os import environ as e\nout = e["SUBJECT_FLAG"]'),
    asks("a variable that is asked for in try", 'try:\n    out = os.environ["SUBJECT_FLAG"]\nexcept KeyError:\n    out = ""'),
    spelled("a variable in a dict of the environment", 'dict(os.environ)["SUBJECT_FLAG"]', refuses=True),
    spelled("a variable that a partial gets", "flag()", 'flag = functools.partial(os.getenv, "SUBJECT_FLAG")', refuses=True),
    spelled("a variable of an environment that is an object's attribute", 'space.env["SUBJECT_FLAG"]',
            "space = SimpleNamespace(env=os.environ)", refuses=True),
    spelled("a variable of an environment that is a helper's default", "of()",
            'def of(env=os.environ): return env["SUBJECT_FLAG"]', refuses=True),
]  # fmt: skip

_OUTER = """
import os
import subprocess
from pathlib import Path
HERE = str(Path(__file__).parent)

@compile_once(CHOICES)
def inner(x, *, staging):
    (staging / "kernel").write_text(str(EXPRESSION))
"""
_INNER = 'out = (inner(x).path / "kernel").read_text()'
_TOOL = {"bin/mytool": "#!/bin/sh\necho version 1\n"}
_RUN = 'subprocess.run([f"{HERE}/bin/mytool"], capture_output=True, text=True, check=True).stdout'
_EDITED = (("version 1", "version 2"), "", "")


def nested(what: str, choices: str, expression: str, edit: tuple[str, str] | None, change: str, undo: str,
           setup: str = "", body: str = _INNER, **more: object) -> Row:  # fmt: skip
    """A compile function that calls another one, which has `choices` of its own."""
    text = _OUTER.replace("CHOICES", choices).replace("EXPRESSION", expression)
    return does(what, setup + text, body, edit, change, undo, compiles=2, **more)


NESTED = [
    nested("a global of the inner compile function", "", "x + N", ("N = 1", "N = 2"), "N = 2", "N = 1", "N = 1\n"),
    nested("a tool of the inner compile function", 'tools=(f"{HERE}/bin/mytool",)', _RUN, *_EDITED, files=_TOOL,
           edits_live=True),
    nested("what load makes of the inner artifact", "load=lambda a: (a.path / 'kernel').read_text() + SUFFIX", "x + 1",
           ("SUFFIX = 'a'", "SUFFIX = 'b'"), "SUFFIX = 'b'", "SUFFIX = 'a'", "SUFFIX = 'a'\n",
           body='out = inner(x)\nif not isinstance(out, str): out = (out.path / "kernel").read_text() + SUFFIX'),
]  # fmt: skip

_SH = "#!/bin/sh\n"
_REAL = f"{_SH}echo version 1\n"


def run(what: str, tools: str, files: dict[str, str], refuses: bool = True, **more: object) -> Row:
    """A tool of `tools` that the compile function runs, by its name."""
    setup = "import os\nimport subprocess\nfrom pathlib import Path\nHERE = str(Path(__file__).parent)\n"
    body = 'out = subprocess.run(["mytool"], capture_output=True, text=True, check=True).stdout'
    path = {"PATH": ("{row}/bin:/usr/bin:/bin",) * 2}
    more = {"environ": path, "edits_live": True, "choices": f"tools={tools}", **more}
    return does(what, setup, body, *_EDITED, files=files, refuses=refuses, **more)


TOOLS = [
    run("a file that a tool's script sources", '("mytool",)',
        {"bin/mytool": f'{_SH}. "$(dirname "$0")/settings.sh"\necho $TEXT\n', "bin/settings.sh": 'TEXT="version 1"\n'}),
    does("a tool that a link names", "import os, subprocess\nfrom pathlib import Path\nHERE = Path(__file__).parent\n"
         "LINK = str(HERE / 'linked')\ndef link(to):\n"
         "    Path(LINK).unlink(missing_ok=True)\n    os.symlink(to, LINK)\nlink('bin/one')",
         "out = subprocess.run([LINK], capture_output=True, text=True, check=True).stdout",
         ("link('bin/one')", "link('bin/two')"), "link('bin/two')", "link('bin/one')",
         files={"bin/one": _REAL, "bin/two": f"{_SH}echo version 2\n"},
         choices="tools=(LINK,)"),
]  # fmt: skip

_READ = 'out = sorted((str(p.relative_to(TREE)), p.read_text()) for p in Path(TREE).rglob("*") if p.is_file())'
_AT = "import os\nfrom pathlib import Path\nHERE = str(Path(__file__).parent)\nTREE = f'{HERE}/in'\n"


def tree(what: str, files: dict[str, str], edit: tuple[str, str] | None = ("version 1", "version 2"), change: str = "",
         undo: str = "", setup: str = "", body: str = _READ, **more: object) -> Row:  # fmt: skip
    """Files of a tree that the compile function reads."""
    more = {"edits_live": not change, "choices": "trees=(TREE,)", **more}
    return does(what, _AT + setup, body, edit, change, undo, files=files, **more)


TREES = [
    tree("a file in a directory that is named as a cache of Python's", {"in/__pycache__/k.in": "version 1\n"}, refuses=True),
    tree("a file in a directory that is named as one of a version control", {"in/.git/k.in": "version 1\n"}, refuses=True),
    tree("a tree that is a file", {"in": "version 1\n"}, body="out = Path(TREE).read_text()"),
    tree("in which directory of a tree a file is", {"in/a/k.in": "text\n", "where.py": "WHERE = 'a'\n"},
         ("WHERE = 'a'", "WHERE = 'b'"), "move('b')", "move('a')",
         setup="from .where import WHERE\ndef move(to):\n    Path(TREE, to).mkdir(exist_ok=True)\n"
               "    for p in [*Path(TREE).rglob('k.in')]: p.replace(Path(TREE, to, 'k.in'))\nmove(WHERE)\n"),
    tree("where a link in a tree leads to", {"out/k.in": "text\n", "in/a": "1\n", "in/b": "2\n"},
         ("link('a')", "link('b')"), "link('b')", "link('a')",
         setup="def link(to):\n    Path(TREE, 'link').unlink(missing_ok=True)\n    os.symlink(to, f'{TREE}/link')\nlink('a')\n",
         body="out = Path(TREE, 'link').read_text()"),
    tree("an empty directory of a tree", {"in/k.in": "text\n"}, ("MADE = 0", "MADE = 1"), "Path(TREE, 'made').mkdir()",
         "Path(TREE, 'made').rmdir()", setup="MADE = 0\nPath(TREE, 'made').exists() and Path(TREE, 'made').rmdir()\n"
         "if MADE: Path(TREE, 'made').mkdir()\n", body="out = Path(TREE, 'made').is_dir()"),
    tree("whether a file of a tree may be executed", {"in/k.in": "text\n"}, ("0o644", "0o755"),
         "os.chmod(f'{TREE}/k.in', 0o700)", "os.chmod(f'{TREE}/k.in', 0o600)",
         setup="os.chmod(f'{TREE}/k.in', 0o644)\n", body="out = os.access(f'{TREE}/k.in', os.X_OK) or "
         "bool(Path(TREE, 'k.in').stat().st_mode & 0o100)"),
]  # fmt: skip
_C = """
import ctypes
import importlib
import importlib.machinery
import importlib.util
import subprocess
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent

def built(text):
    source = HERE / "native.c"
    source.write_text(text)
    names = iter(range(1000))
    place = next(p for p in (HERE / f"build{n}" for n in names) if not p.exists())
    place.mkdir()
    path = place / "native.so"
    include = sysconfig.get_paths()["include"]
    subprocess.run(["gcc", "-shared", "-fPIC", "-O0", f"-I{include}", "-o", path, source], check=True)
    return path

TEXT = '''
#include <Python.h>
static PyObject *size(PyObject *self, PyObject *x) { return PyLong_FromLong(1); }
static PyMethodDef methods[] = {{"size", size, METH_O, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "native", "", -1, methods};
PyMODINIT_FUNC PyInit_native(void) { return PyModule_Create(&module); }
'''

def load(text):
    path = str(built(text))
    loader = importlib.machinery.ExtensionFileLoader("native", path)
    spec = importlib.util.spec_from_file_location("native", path, loader=loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module

native = original = load(TEXT)
"""
_NATIVE_EDIT = ("PyLong_FromLong(1)", "PyLong_FromLong(2)")
_PLAIN = "int size(void) { return 1; }"
_LOAD = _C[: _C.index("TEXT = ")] + f"lib = original = ctypes.CDLL(str(built('{_PLAIN}')))\n"

NATIVE = [
    reads("a function of a module of C", _C, "native.size(x)", _NATIVE_EDIT, "native = load(TEXT.replace('g(1)', 'g(2)'))",
          "native = original", refuses=True),
    reads("a function of a module of C that is a global", f"{_C}size = kept = native.size", "size(x)", _NATIVE_EDIT,
          "size = load(TEXT.replace('g(1)', 'g(2)')).size", "size = kept", refuses=True),
    reads("a function of a library that ctypes loads", _LOAD, "lib.size()", ("return 1", "return 2"),
          f"lib = ctypes.CDLL(str(built('{_PLAIN.replace('1', '2')}')))", "lib = original", refuses=True),
] if shutil.which("gcc") else []  # fmt: skip

ROWS = [*ENVIRONMENT, *NESTED, *TOOLS, *TREES, *NATIVE]
