"""Extensions that torch builds with ninja: whose builds are shared, what their keys see, and what people have met."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kcoord.backends.ninja.request import inputs_of
from kcoord.keys.tools import commands
from kcoord.keys.tools.commands import Inputs
from kcoord.packs.recipe_files import paths_of_parts
from tests.support.command import kcoord
from tests.support.sandbox import Sandbox, eventually, finish

pytest.importorskip("torch.utils.cpp_extension")

MODULE = """
#include <Python.h>
#include "number.h"
static PyObject *number(PyObject *self, PyObject *unused) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"number", number, METH_NOARGS, ""}, {}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "numbers", "", -1, methods};
PyMODINIT_FUNC PyInit_numbers() { return PyModule_Create(&module); }
"""

LOADS = """
import json, sys
if sys.argv[1] != "stock":
    import kcoord
    kcoord.install()
from torch.utils import cpp_extension
builds, native = [], cpp_extension._run_ninja_build
def build(*arguments, **keywords):
    builds.append(1)
    native(*arguments, **keywords)
    if sys.argv[1] == "edited":
        open(sys.argv[3], "a").write("// while it was built\\n")
cpp_extension._run_ninja_build = build
loaded = [cpp_extension.load("numbers", [sys.argv[2]]).number()]
if sys.argv[1] == "twice":
    open(sys.argv[3], "w").write("#define NUMBER 8\\n")
    loaded.append(cpp_extension.load("numbers", [sys.argv[2]]).number())
print(json.dumps({"numbers": loaded, "builds": len(builds)}))
"""


@pytest.fixture
def source(sandbox: Sandbox) -> Path:
    path = sandbox.root / "source" / "numbers.cpp"
    path.parent.mkdir()
    path.write_text(MODULE)
    path.with_name("number.h").write_text("#define NUMBER 7\n")
    return path


def load(
    sandbox: Sandbox, source: Path, *more: Path, directory: str = "extensions", kind: str = "shared"
) -> dict[str, object]:
    done = sandbox.run_forked("-c", LOADS, kind, source, *more, TORCH_EXTENSIONS_DIR=str(sandbox.root / directory))
    assert done.returncode == 0, done.stderr
    assert "please report it" not in done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_processes_with_directories_of_their_own_build_once(sandbox: Sandbox, source: Path) -> None:
    assert load(sandbox, source, directory="one") == {"numbers": [7], "builds": 1}
    assert load(sandbox, source, directory="two") == {"numbers": [7], "builds": 0}


FILE = """
import sys
import kcoord
kcoord.install()
from torch.utils import cpp_extension
print(cpp_extension.load("numbers", [sys.argv[1]], is_python_module=False))
"""

GONE = """
import shutil, sys
import kcoord
kcoord.install()
from torch.utils import cpp_extension
native = cpp_extension._run_ninja_build
def build(*arguments, **keywords):
    native(*arguments, **keywords)
    shutil.rmtree(sys.argv[2])
cpp_extension._run_ninja_build = build
print(cpp_extension.load("numbers", [sys.argv[1]]).number())
"""


@pytest.mark.parametrize("rank", ["that builds", "that loads"])
def test_a_library_is_where_torch_would_have_built_it(sandbox: Sandbox, source: Path, rank: str) -> None:
    """Other programs load it by that path, also when the job is over."""
    if rank == "that loads":
        load(sandbox, source)
    place = sandbox.root / "named" / "numbers"
    done = sandbox.run_forked("-c", FILE, source, TORCH_EXTENSIONS_DIR=str(place.parent))
    assert (done.returncode, done.stdout) == (0, f"{place}/numbers.so\n"), done.stderr
    assert ctypes.CDLL(f"{place}/numbers.so").PyInit_numbers


def test_a_library_is_loaded_though_torchs_directory_goes_while_it_is_built(sandbox: Sandbox, source: Path) -> None:
    place = sandbox.root / "named"
    done = sandbox.run_forked("-c", GONE, source, place, TORCH_EXTENSIONS_DIR=str(place))
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


INLINE = """
import sys
import kcoord
kcoord.install()
from torch.utils import cpp_extension
builds, native = [], cpp_extension._run_ninja_build
cpp_extension._run_ninja_build = lambda *given, **named: builds.append(1) or native(*given, **named)
source = sys.argv[1].replace('#include "number.h"', "#define NUMBER 9")
module = cpp_extension.load_inline("numbers", [source], no_implicit_headers=True)
print(module.number(), len(builds))
"""


@pytest.mark.parametrize("program", [INLINE, LOADS], ids=["load_inline", "load"])
def test_an_extension_of_a_profile_is_built_before_the_job(sandbox: Sandbox, source: Path, program: str) -> None:
    store = {"KCOORD_STORE": str(sandbox.root / "store"), "KCOORD_STORE_CREATE": "1", "KCOORD_PROFILE": "job"}
    profile = sandbox.root / "store" / "v2" / "profiles" / "job"
    arguments = (program, MODULE) if program is INLINE else (program, "shared", source)

    def train(name: str) -> str:
        places = {
            "TORCH_EXTENSIONS_DIR": str(sandbox.root / name),
            "KCOORD_LOCAL_DIR": str(sandbox.root / f"{name}-local"),
        }
        done = sandbox.run_forked("-c", *arguments, **places, **store)
        assert done.returncode == 0, done.stderr
        return str(done.stdout.splitlines()[-1])

    first = train("first")
    eventually(lambda: paths_of_parts(profile), timeout=60, what="the profile is stored")
    for lost in ("objects", "packs"):
        shutil.rmtree(sandbox.root / "store" / "v2" / lost, ignore_errors=True)
    warmed = kcoord(sandbox, "warmup", "job", **store)
    assert "1 compiled" in warmed.stdout, warmed.stdout + warmed.stderr
    second = train("second")
    assert (first, second) in (("9 1", "9 0"), ('{"numbers": [7], "builds": 1}', '{"numbers": [7], "builds": 0}'))


def test_a_changed_header_is_seen_by_the_process_that_has_the_module_already(sandbox: Sandbox, source: Path) -> None:
    assert load(sandbox, source, source.with_name("number.h"), kind="twice") == {"numbers": [7, 8], "builds": 2}
    assert load(sandbox, source) == {"numbers": [8], "builds": 0}


AGAIN = """
import os, sys
import kcoord
kcoord.install()
from torch.utils import cpp_extension
first = cpp_extension.load("numbers", [sys.argv[1]])
os.environ["CFLAGS"] = "-O1"
print(first.__file__ == cpp_extension.load("numbers", [sys.argv[1]]).__file__)
"""


def test_an_extension_that_has_not_changed_is_not_loaded_from_another_place(sandbox: Sandbox, source: Path) -> None:
    """Operators that it registers (``TORCH_LIBRARY``) would be registered twice, which ends the process."""
    done = sandbox.run_forked("-c", AGAIN, source, TORCH_EXTENSIONS_DIR=str(sandbox.root / "extensions"))
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_build_whose_header_is_edited_meanwhile_is_not_shared(sandbox: Sandbox, source: Path) -> None:
    header, before = source.with_name("number.h"), source.with_name("number.h").read_text()
    assert load(sandbox, source, header, kind="edited") == {"numbers": [7], "builds": 1}
    header.write_text(before)
    assert load(sandbox, source) == {"numbers": [7], "builds": 1}


GENERATES = """
import os, pathlib, sys, time
import kcoord
kcoord.install()
from torch.utils import cpp_extension
builds, native = [], cpp_extension._run_ninja_build
def build(*arguments, **keywords):
    builds.append(1)
    place = pathlib.Path(sys.argv[3])
    gate = place / ("later" if list(place.glob("building.*")) else "first")
    (place / f"building.{os.getpid()}").touch()
    while not gate.exists():
        time.sleep(0.01)
    native(*arguments, **keywords)
cpp_extension._run_ninja_build = build
open(sys.argv[1], "w").write(sys.argv[2])
print(cpp_extension.load("numbers", [sys.argv[1]]).number(), len(builds))
"""


def waiting(sandbox: Sandbox) -> list[int]:
    """The number of ranks that wait for each build."""
    listed = kcoord(sandbox, "status", "--json")
    return [len(flight["waiting"]) for flight in json.loads(listed.stdout)["flights"]] if listed.returncode == 0 else []


def ranks_that_wait(sandbox: Sandbox, rank: Callable[[], Any]) -> list[Any]:
    """Two more ranks, one after the other: one that writes the file empties it first, and another would read it empty."""
    ranks = []
    for number in (1, 2):
        ranks.append(rank())
        eventually(lambda: waiting(sandbox) == [number], 60, f"{number} ranks wait")  # noqa: B023 - called at once
    return ranks


def test_a_source_that_each_rank_generates_with_equal_text_is_built_once(sandbox: Sandbox, source: Path) -> None:
    """They write it in place, while the first rank's compiler reads it."""
    source.with_name("number.h").unlink()
    arguments = (source, MODULE.replace('#include "number.h"', "#define NUMBER 7"), sandbox.root)

    def rank() -> Any:
        return sandbox.fork("-c", GENERATES, *arguments, TORCH_EXTENSIONS_DIR=str(sandbox.root / "extensions"))

    first = rank()
    eventually(lambda: list(sandbox.root.glob("building.*")), 60)
    others = ranks_that_wait(sandbox, rank)
    (sandbox.root / "first").touch()
    done = [finish(process) for process in (first, *others)]
    assert [d.stdout for d in done] == ["7 1\n", "7 0\n", "7 0\n"], done[0].stderr


def test_a_build_that_is_not_shared_holds_nobody_up(sandbox: Sandbox, source: Path) -> None:
    """A header beside the source is written in place: the compiler may have read it when it was empty."""
    header = source.with_name("number.h")
    arguments = (header, "#define NUMBER 7\n", sandbox.root, source)

    def rank() -> Any:
        program = GENERATES.replace('load("numbers", [sys.argv[1]])', 'load("numbers", [sys.argv[4]])')
        return sandbox.fork("-c", program, *arguments, TORCH_EXTENSIONS_DIR=str(sandbox.root / "extensions"))

    first = rank()
    eventually(lambda: list(sandbox.root.glob("building.*")), 60)
    others = ranks_that_wait(sandbox, rank)
    (sandbox.root / "first").touch()
    eventually(lambda: len(list(sandbox.root.glob("building.*"))) == 3, 30)
    (sandbox.root / "later").touch()
    done = [finish(process) for process in (first, *others)]
    assert [d.stdout for d in done] == ["7 1\n", "7 1\n", "7 1\n"], done[0].stderr


def test_the_lock_file_of_a_builder_that_was_killed_holds_nobody_up(sandbox: Sandbox, source: Path) -> None:
    """pytorch#189245: stock waits for it for ever."""
    lock = sandbox.root / "extensions" / "numbers" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert load(sandbox, source) == {"numbers": [7], "builds": 1}


def test_a_torch_that_cannot_name_the_inputs_says_why_in_its_own_words(sandbox: Sandbox, source: Path) -> None:
    source.with_name("number.h").unlink()
    done = sandbox.run_forked(*("-c", LOADS, "shared", source), TORCH_EXTENSIONS_DIR=str(sandbox.root / "extensions"))
    assert done.returncode == 1
    assert "Error building extension 'numbers'" in done.stderr
    assert "please report it" not in done.stderr


def test_sources_of_load_inline_are_replaced_as_a_whole(tmp_path: Path) -> None:
    from kcoord.backends.ninja.hooks import _maybe_write

    path = tmp_path / "main.cpp"
    _maybe_write(str(path), "one")
    first = path.stat().st_ino
    _maybe_write(str(path), "one")
    assert path.stat().st_ino == first, "ninja would build again"
    reader = path.open()
    _maybe_write(str(path), "two")
    assert (reader.read(), path.read_text()) == ("one", "two")
    reader.close()


NINJA = """
rule compile
  command = g++ -MMD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = g++ $in -shared {libraries} -o $out
build one.o: compile {source}
build one.so: link one.o
"""


def read(tmp_path: Path, libraries: str = "", ninja: str = NINJA) -> Inputs:
    directory = tmp_path / "build"
    directory.mkdir(exist_ok=True)
    (directory / "build.ninja").write_text(ninja.format(source=tmp_path / "one.cpp", libraries=libraries))
    return inputs_of(directory / "build.ninja", directory, tmp_path / "local")[0]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    (tmp_path / "one.cpp").write_text('#include "one.h"\n')
    (tmp_path / "one.h").write_text('#include "two.h"\n')
    (tmp_path / "two.h").write_text("")
    return tmp_path


@pytest.mark.parametrize("name", ["one.cpp", "one.h", "two.h"])
def test_each_file_that_a_build_reads_is_among_its_inputs(written: Path, name: str) -> None:
    before = read(written)
    assert read(written) == before
    with (written / name).open("a") as file:
        file.write("// more\n")
    after = read(written)
    assert (before.unchanged(), after.unchanged()) == (False, True)
    assert after.files != before.files
    assert after.tools == before.tools
    assert before.tools[0] == "g++"


@pytest.mark.parametrize(
    "flag", ["-L{} -lthree", "{}/libthree.a", "-Wl,--version-script={}/libthree.a", "-ccbin {}/libthree.a"]
)
def test_a_file_that_a_flag_names_is_an_input_by_its_content(written: Path, flag: str) -> None:
    (library := written / "libthree.a").touch()
    assert str(library) in read(written, flag.format(written)).tools


def test_flags_in_a_file_are_left_to_torch(written: Path) -> None:
    with pytest.raises(ValueError, match="flags in a file: @more"):
        read(written, "@more")


@pytest.mark.parametrize("flag", ["-L.", "-L lib", "./libthree.a", "libthree.a", "-I include"])
def test_flags_that_are_relative_to_the_directory_are_left_to_torch(written: Path, flag: str) -> None:
    with pytest.raises(ValueError, match="is relative to the directory of the build"):
        read(written, flag)


def test_the_compiler_is_not_asked_for_headers_that_have_not_changed(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kcoord.keys.tools.machine_cache._RACY", 0)
    before = read(written)
    monkeypatch.setattr(commands, "_named", lambda *arguments: pytest.fail("it was asked again"))
    assert read(written) == before


def test_no_directory_of_sources_headers_and_outputs_is_in_the_key(written: Path, tmp_path: Path) -> None:
    ninja = NINJA.replace("$flags", f"-I{tmp_path} -isystem {tmp_path}").replace(
        "one.o", str(tmp_path / "build" / "one.o")
    )
    assert str(tmp_path) not in read(written, ninja=ninja).text


def test_a_source_that_includes_what_is_not_there_is_left_to_torch(written: Path) -> None:
    (written / "two.h").unlink()
    with pytest.raises(subprocess.CalledProcessError):
        read(written)
