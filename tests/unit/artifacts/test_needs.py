"""Needs of artifacts: what a manifest records of host libraries, and what becomes of an artifact whose needs a host lacks."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kcoord
from kcoord.artifacts import elf, needs
from kcoord.artifacts.describe import describe
from kcoord.artifacts.manifest import LARGEST_IN_MEMORY, Manifest, Origin
from kcoord.errors import ArtifactInvalid
from kcoord.keys.host import host_abi
from kcoord.rank.coordinator import Coordinator
from kcoord.settings import Settings
from tests.support.sandbox import Sandbox

if not shutil.which("gcc"):
    pytest.skip("no gcc", allow_module_level=True)

ROOT = Path(__file__).parents[3]
SOURCE = '#include <stdio.h>\nint answer(void) {{ return puts("asked") < 0 ? -1 : {}; }}\n'
MACHINE = f"machine {needs._machine()}"


def build(directory: Path, answer: int = 42) -> Path:
    """A library that needs the C library."""
    library, source = directory / "library.so", directory / "source.c"
    source.write_text(SOURCE.format(answer))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    source.unlink()
    return library


def build_on_a_newer_host(directory: Path, answer: int = 42) -> Path:
    """The versions that it needs are raised: no host has them."""
    library = build(directory, answer)
    library.write_bytes(re.sub(rb"GLIBC_2(?=\.)", b"GLIBC_9", library.read_bytes()))
    return library


def loads(library: Path) -> str:
    """What the dynamic linker says of it; empty if it loads."""
    code = "import ctypes, sys\ntry: ctypes.CDLL(sys.argv[1])\nexcept OSError as error: print(error)"
    return subprocess.run([sys.executable, "-c", code, library], capture_output=True, text=True, check=True).stdout


def needs_of(library: Path) -> set[str]:
    return needs.needs_of(elf.of_bytes(library.read_bytes()))


# --- files ---


@pytest.mark.parametrize("language", ["c", "c++"])
def test_a_library_needs_the_versions_that_its_linker_wrote(tmp_path: Path, language: str) -> None:
    source = tmp_path / "a"
    source.write_text(
        '#include <stdio.h>\nvoid f() { puts("x"); }'
        if language == "c"
        else '#include <iostream>\n#include <string>\nvoid f(std::string& s) { s += "x"; std::cout << s; throw 1; }'
    )
    library = tmp_path / "a.so"
    subprocess.run(["g++", "-x", language, "-shared", "-fPIC", "-o", library, source], check=True)
    listed = subprocess.run(["readelf", "-VW", library], capture_output=True, text=True, check=True).stdout
    oracle, file = {MACHINE}, ""
    for line in listed.partition(".gnu.version_r")[2].splitlines():
        file = match[1] if (match := re.search(r"File: (\S+)", line)) else file
        if match := re.search(r"Name: (\S+)  Flags: none", line):
            oracle.add(f"{file} {match[1]}")
    assert needs_of(library) == oracle
    assert any("libstdc++.so.6 GLIBCXX_" in need for need in oracle) is (language == "c++")


def test_a_library_that_loads_here_has_no_unmet_need_and_one_that_does_not_has(tmp_path: Path) -> None:
    found = [path for path in Path(needs._loaded("libc.so.6")).parent.glob("*.so*") if path.is_file()]
    assert found
    lacking = {path: unmet for path in found[:200] if (unmet := needs.unmet(needs_of(path)))}
    assert [path for path in lacking if not loads(path)] == []
    newer = build_on_a_newer_host(tmp_path)
    assert "GLIBC_9" in loads(newer)
    assert needs.unmet(needs_of(newer)) == sorted(need for need in needs_of(newer) if need != MACHINE)


def test_a_library_of_another_release_than_the_loaded_one_is_unmet_and_an_unknown_library_is_met(
    tmp_path: Path,
) -> None:
    code = """
import ctypes, sys
from kcoord.artifacts import needs
ctypes.CDLL(sys.argv[1])
print(needs.unmet(["libkcruntime.so.12 libkcruntime.so.12", "libkcunknown.so.3 ONE_1"]))
"""
    runtime = build(tmp_path).rename(tmp_path / "libkcruntime.so.13.0.48")
    done = subprocess.run([sys.executable, "-c", code, runtime], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "['libkcruntime.so.12 libkcruntime.so.12']\n"


@pytest.mark.parametrize("machine", [190, 224, 243], ids=["NVIDIA", "AMD", "RISC-V"])
def test_code_for_a_gpu_and_for_another_processor_has_no_needs(tmp_path: Path, machine: int) -> None:
    content = bytearray(build(tmp_path).read_bytes())
    struct.pack_into("<H", content, 18, machine)
    assert needs.needs_of(elf.of_bytes(bytes(content))) == set()


def test_a_need_of_another_processor_is_unmet() -> None:
    assert needs.unmet([MACHINE, "machine 243"]) == ["machine 243"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return build(tmp_path_factory.mktemp("library")).read_bytes()


@given(data=st.data())
def test_a_damaged_file_has_some_needs_or_none(library: bytes, data: st.DataObject) -> None:
    content = bytearray(library)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, 63), st.integers(0, len(content) - 8)))
        content[at : at + 8] = data.draw(st.sampled_from([b"\0" * 8, b"\xff" * 8, b"\xff\xff\0\0\0\0\0\0"]))
    cut = bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])
    assert needs.needs_of(elf.of_bytes(cut)) <= {MACHINE} | {n for n in needs.needs_of(elf.of_bytes(cut)) if " " in n}
    elf.defined(elf.of_bytes(cut))


@pytest.mark.parametrize("count", [0, 0xFFFF])
@pytest.mark.parametrize("flags", [0, 2], ids=["needed", "weak"])
def test_a_file_that_repeats_itself_costs_no_time(count: int, flags: int) -> None:
    """Libraries, each with one version over and over; and the section is listed as often as may be."""
    first, last = (struct.pack("<HHIIIIHHII", 1, count, 0, 16, step, 0, flags, 0, 0, 0) for step in (32, 0))
    libraries = first * 8_000 + last
    start = 64 + 4096 * 64
    section = struct.pack("<4xI16xQQI20x", 0x6FFFFFFE, start, len(libraries), 0)
    head = struct.pack("<4sBB10xHH20xQ10xHH2x", b"\x7fELF", 2, 1, 3, needs._machine(), 64, 64, 4096)
    begun = time.process_time()
    needs.needs_of(elf.of_bytes(head + section * 4096 + libraries))
    assert time.process_time() - begun < 1


# --- manifests ---


@pytest.mark.parametrize("size", [0, LARGEST_IN_MEMORY + 1], ids=["in memory", "in pieces"])
def test_a_manifest_states_the_needs_of_all_files(tmp_path: Path, size: int) -> None:
    found = needs_of(build(tmp_path))
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(size)
    manifest = describe(tmp_path, key(), 1.0, Origin()).manifest
    assert manifest.needs == tuple(sorted(found))
    assert Manifest.decode(manifest.encode()) == manifest


@pytest.mark.parametrize(
    "stated",
    [None, "libc.so.6 X", [1], [b"a b"], {"a b": 1}, ["a b"] * 4097, ["x"], ["/tmp/x.so X"], ["a\0 b"], ["a b c"]],
)
def test_a_list_of_needs_that_is_none_is_refused(tmp_path: Path, stated: Any) -> None:
    (tmp_path / "kernel.bin").write_bytes(b"code")
    document = msgpack.unpackb(describe(tmp_path, key(), 1.0, Origin()).manifest.encode())
    assert "needs" not in document
    document["needs"] = stated
    with pytest.raises(ArtifactInvalid):
        Manifest.decode(msgpack.packb(document))


# --- ranks ---


@pytest.fixture
def settings(sandbox: Sandbox) -> Settings:
    """Of ranks that share a local directory, a store and an agent, until it goes."""
    return Settings.from_environ(
        {
            "KCOORD_LOCAL_DIR": str(sandbox.local),
            "KCOORD_STORE": str(sandbox.root / "store"),
            "KCOORD_STORE_CREATE": "1",
        }
    )


class Rank(Coordinator):
    """A new process, as far as kcoord knows."""

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, compile: Any, wait: bool = True) -> kcoord.Artifact:
        found = self.ensure(key(), kcoord.keys.device.CPU, compile, wait=wait)
        assert isinstance(found, kcoord.Artifact)
        return found


def key() -> kcoord.CacheKey:
    return kcoord.CacheKey.of("test", "library", source=SOURCE)


def refuse(staging: Path) -> None:
    raise AssertionError("it should not have been compiled")


def answer_of(artifact: kcoord.Artifact) -> int:
    found: int = ctypes.CDLL(str(artifact.path / "library.so")).answer()
    return found


def test_a_host_that_lacks_a_need_compiles_under_a_key_of_its_own_once_and_nothing_is_set_aside(
    settings: Settings,
) -> None:
    with Rank(settings) as newer:
        portable = newer.ask(build_on_a_newer_host)
    with Rank(settings) as older:
        own = older.ask(build)
        assert answer_of(own) == 42
        assert [each.name for each in portable.key.diff(own.key)] == ["host libraries"]
        counted = older.counters.read()
        assert (counted["compiles"], counted["local_hits"]) == (1, 0), "the other one is no hit"
    with Rank(settings) as third:
        assert third.ask(refuse).path == own.path
        assert third.ask(refuse, wait=False).path == own.path
    assert portable.path.exists()
    assert not list(settings.local_dir.glob("objects/*/.kcoord/quarantine/*"))


def test_another_node_gets_both_from_the_store_and_keeps_its_own(sandbox: Sandbox, settings: Settings) -> None:
    with Rank(settings) as newer:
        newer.ask(build_on_a_newer_host)
    with Rank(settings) as older:
        older.ask(build)
    elsewhere = {"KCOORD_LOCAL_DIR": str(sandbox.root / "elsewhere"), "KCOORD_STORE": str(sandbox.root / "store")}
    with Rank(Settings.from_environ(elsewhere)) as other:
        assert answer_of(other.ask(refuse)) == 42


def test_a_newer_host_loads_a_library_of_an_older_one(settings: Settings) -> None:
    with Rank(settings) as older:
        built = older.ask(build)
    assert built.manifest.needs
    with Rank(settings) as newer:
        assert newer.ask(refuse).path == built.path


# --- keys ---


def test_a_c_librarys_release_makes_no_other_key(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = host_abi()
    monkeypatch.setattr("os.confstr", lambda name: "glibc 2.17")
    host_abi.cache_clear()
    assert host_abi() == mine
    assert needs.host_libraries()[1] == "glibc-2.17"
    host_abi.cache_clear()
