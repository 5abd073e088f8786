"""The programs of ``test_by_value.py``: a driver that sends functions by value, and a worker that runs what it is sent."""

from __future__ import annotations

PROJECT = """
import enum
from dataclasses import dataclass

import kcoord

UNIT = 1
KIND = "version 1"


def helper(x):
    return f"{x} in version 1"


class Tiles:
    size = 1

    def text(self, x):
        return f"{x} tiles of version 1"


@dataclass
class Config:
    tile: int = 1

    def text(self):
        return f"{self.tile} of version 1"


class Mode(enum.Enum):
    FAST = "version 1"

    def text(self):
        return f"mode of version 1"


def build(x, *, staging):
    (staging / "kernel").write_text(helper(x))
"""

DRIVER = (
    PROJECT
    + '''
import functools
import sys
from pathlib import Path

import cloudpickle
import other
import project

cloudpickle.register_pickle_by_value(project)
CASES = {}


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


@case
def a_function_of_main(x, *, staging):
    (staging / "kernel").write_text("version 1")


@case
def a_helper_of_main(x, *, staging):
    (staging / "kernel").write_text(helper(x))


@case
def a_constant_of_main(x, *, staging):
    (staging / "kernel").write_text(KIND)


@case
def a_class_of_main(x, *, staging):
    (staging / "kernel").write_text(Tiles().text(x))


@case
def a_dataclass_of_main_in_a_list(x, *, staging, configs=(Config(),)):
    (staging / "kernel").write_text("".join(c.text() for c in configs))


@case
def an_enum_of_main(x, *, staging):
    (staging / "kernel").write_text(Mode.FAST.text() + Mode.FAST.value)


@case
def a_helper_of_a_module_that_is_sent_by_value(x, *, staging):
    (staging / "kernel").write_text(sent_helper(x))


@case
def a_class_of_a_module_that_is_sent_by_value(x, *, staging):
    (staging / "kernel").write_text(SentTiles().text(x))


@case
def a_class_with_a_base_that_the_worker_imports(x, *, staging):
    (staging / "kernel").write_text(Derived().text(x))


@case
def a_partial_of_a_helper(x, *, staging):
    (staging / "kernel").write_text(step())


@case
def a_lambda(x, *, staging):
    (staging / "kernel").write_text(brief())


@case
def a_module_that_the_worker_imports(x, *, staging):
    import other

    (staging / "kernel").write_text(other.helper(x))


class Derived(other.Tiles):
    def text(self, x):
        return super().text(x) + "version 1"


sent_helper, SentTiles = project.helper, project.Tiles
step = functools.partial(helper, 7)
brief = lambda: "version 1"


def closed(text):
    def function(x, *, staging):
        (staging / "kernel").write_text(text)

    return function


CASES["a closure"] = closed("version 1")
CASES["a function of a module that is sent by value"] = project.build


@kcoord.compile_once(scope=kcoord.Scope.TARGET)
def decorated(x, *, staging):
    (staging / "kernel").write_text(helper(x))


@kcoord.compile_once(scope=kcoord.Scope.TARGET)
def called(x, *, staging):
    (staging / "kernel").write_text(helper(x))


class Maker:
    def __init__(self, text):
        self.text = text

    @kcoord.compile_once(scope=kcoord.Scope.TARGET)
    def build(self, x, *, staging):
        (staging / "kernel").write_text(self.text + helper(x))


def compiled(function, decorated=None):
    """What `function` writes when it is called, what it is served as, and how many compiles that took."""

    def task():
        import tempfile
        from pathlib import Path

        import kcoord

        truth = Path(tempfile.mkdtemp())
        function(3, staging=truth)
        count = lambda: kcoord.connect().counters.read()["compiles"]
        before = count()
        build = decorated or kcoord.compile_once(scope=kcoord.Scope.TARGET)(function)
        served = build(3).path / "kernel"
        return (truth / "kernel").read_text(), served.read_text(), count() - before

    return task


called(3)
maker = Maker("version 1")
TASKS = {name: compiled(function) for name, function in CASES.items()}
TASKS["a function that the driver decorated"] = compiled(decorated.__wrapped__, decorated)
TASKS["a function that the driver called"] = compiled(called.__wrapped__, called)
TASKS["a method of an object of main"] = compiled(functools.partial(Maker.build.__wrapped__, maker), maker.build)


def sent(task):
    """A function that cannot be sent is an outcome, too."""
    try:
        return cloudpickle.dumps(task)
    except Exception as error:
        return cloudpickle.dumps(f"{type(error).__name__}: {error}")


Path(sys.argv[1]).write_bytes(cloudpickle.dumps({name: sent(task) for name, task in TASKS.items()}))
'''
)

WORKER = """
import json
import pickle
import sys

home, *sent = sys.argv[1:]
sys.path.insert(0, home)
try:
    import project  # its version is not that of what was sent
except ImportError:
    pass


def helper(x):
    return "the worker's own"


KIND, UNIT, step = "the worker's own", 5, None


def outcome(task):
    try:
        task = pickle.loads(task)
        return [task, "", 0] if isinstance(task, str) else task()
    except Exception as error:
        return [f"{type(error).__name__}: {error}", "", 0]


found = []
for path in sent:
    with open(path, "rb") as file:
        found.append({name: outcome(task) for name, task in pickle.load(file).items()})
print(json.dumps(found))
"""

NAMES = (
    "a function of main", "a helper of main", "a constant of main", "a class of main", "a dataclass of main in a list",
    "an enum of main", "a helper of a module that is sent by value", "a class of a module that is sent by value",
    "a class with a base that the worker imports", "a partial of a helper", "a lambda", "a closure",
    "a module that the worker imports", "a function of a module that is sent by value",
    "a function that the driver decorated", "a function that the driver called", "a method of an object of main",
)  # fmt: skip
