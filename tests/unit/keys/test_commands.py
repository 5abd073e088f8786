"""Inputs of compiler commands: whatever changes an output is among them, and no directory that does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kcoord.keys.tools import commands
from kcoord.keys.tools.commands import Inputs
from kcoord.keys.tools.toolchain import tools


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were just written are in the machine's cache, too."""
    monkeypatch.setattr("kcoord.keys.tools.machine_cache._RACY", 0)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return source(tmp_path / "one")


def source(directory: Path, header: str = "#define NUMBER 1\n") -> Path:
    """A directory with a source that includes a header."""
    directory.mkdir()
    (directory / "k.cpp").write_text('#include "number.h"\nint number = NUMBER;\n')
    (directory / "number.h").write_text(header)
    return directory


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def read(directory: Path, *flags: str, of: str = "k.cpp", compiler: str = "g++") -> Inputs:
    return commands.inputs_of([(compiler, *flags, "-c", of)], [of], directory, directory.parent / "local")


def test_directories_with_headers_of_their_own_have_keys_of_their_own(place: Path) -> None:
    """The machine remembers which headers a command reads: of this directory alone."""
    other = source(place.with_name("two"), "#define NUMBER 2\n")
    assert read(place, "-I.").files != read(other, "-I.").files
    absolute = [read(each, of=str(each / "k.cpp")) for each in (place, other)]
    assert absolute[0].files != absolute[1].files


def test_ranks_with_directories_of_their_own_have_one_key(place: Path) -> None:
    other = source(place.with_name("two"))
    for flags in ("-I{}", "-isystem {}", "-DX=1 -I {}"):
        mine, others = (read(each, *flags.format(each).split(), of=str(each / "k.cpp")) for each in (place, other))
        assert mine == others


def test_a_directory_without_headers_is_as_good_as_any_other(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank writes a source into a directory of its own: one of them asks the compiler for headers."""
    asked, native = [], commands._named
    monkeypatch.setattr(commands, "_named", lambda *given: asked.append(1) or native(*given))
    ranks = [place / name for name in ("rank0", "rank1", "rank2")]
    for rank in ranks:
        rank.mkdir()
        (rank / "k.cpp").write_text('#include "number.h"\nint number = NUMBER;\n')
    found = [read(rank, f"-I{place}", of=str(rank / "k.cpp")) for rank in ranks[:2]]
    assert (found[0], len(asked)) == (found[1], 1)
    (ranks[2] / "number.h").write_text("#define NUMBER 2\n")
    assert read(ranks[2], f"-I{place}", of=str(ranks[2] / "k.cpp")).files != found[0].files
    assert read(ranks[0], "-I..", of="k.cpp").files == found[0].files
    assert len(asked) == 3


@pytest.mark.parametrize("flag", ["-DTILE={}", '-DROOT="{}"', "-march={}"])
def test_a_flag_that_looks_like_a_directory_counts(place: Path, flag: str) -> None:
    texts = set()
    for name in ("64", "128"):
        source(place / name)
        of = f"{name}/k.cpp"
        line = ("g++", flag.format(name), "-c", of)
        texts.add(" ".join(commands._neutral(line, {of: commands._read(str(place / of))}, set())))
    assert len(texts) == 2


def test_headers_belong_to_their_compile(place: Path) -> None:
    """Two sources whose headers change places."""
    found = []
    for numbers in ("12", "21"):
        directory = place / numbers
        directory.mkdir()
        lines = []
        for name, number in zip("ab", numbers, strict=True):
            (directory / f"{name}.cpp").write_text('#include "number.h"\n')
            source(directory / name, f"#define NUMBER {number}\n")
            lines.append(("g++", f"-I{directory / name}", "-c", f"{name}.cpp"))
        found.append(commands.inputs_of(lines, ["a.cpp", "b.cpp"], directory, place / "local"))
    assert found[0].files != found[1].files


@pytest.mark.parametrize("text", ['__asm__(".incbin \\"data\\"");', '.include "more.s"', 'asm(".include \\"x\\"");'])
def test_a_file_that_the_assembler_reads_is_not_understood(place: Path, text: str) -> None:
    (place / "number.h").write_text(text)
    with pytest.raises(ValueError, match=r"number\.h includes a file by a directive of the assembler"):
        read(place)


def test_a_rule_that_the_command_sends_elsewhere_is_read_all_the_same(place: Path) -> None:
    """Those of tvm_ffi do, for nvcc."""
    nvcc = script(place / "nvcc", 'case "$*" in *dependency-output*) ;; *) exec g++ "$@" ;; esac')
    found = read(place, "--dependency-output", "k.d", compiler=nvcc)
    assert str(place / "number.h") in found.paths


def test_a_compiler_that_names_no_headers_is_not_understood(place: Path) -> None:
    with pytest.raises(ValueError, match="prints no rule of its headers"):
        read(place, compiler=script(place / "silent", "exit 0"))


@pytest.mark.parametrize("flags", ["-L{} -lhelper", "-L {} -lhelper", "-L{} -l:libhelper.a", "-lhelper"])
def test_a_library_that_is_linked_counts_by_its_content(
    place: Path, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    library = place / "libhelper.a"
    library.touch()
    monkeypatch.setenv("LIBRARY_PATH", "" if "{}" in flags else str(place))
    link = ("g++", "k.o", *flags.format(place).split(), "-o", "k.so")
    assert str(library) in commands.inputs_of([link], [], place, place / "local").tools


def test_nvccs_host_compilers_count(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = script(place / "nvcc", 'exec /usr/bin/g++ "$@"')
    assert read(place, compiler=nvcc).tools == (nvcc,)
    assert {"nvcc/gcc", "nvcc/g++", "nvcc/g++/cc1plus"} < tools([nvcc], place / "local").keys(), "those of PATH"
    monkeypatch.setenv("NVCC_CCBIN", nvcc)
    assert list(commands._host_compilers([nvcc, "-ccbin=gcc", "--compiler-bindir", "cc"], place)) == [
        "gcc",
        "cc",
        nvcc,
    ]


@pytest.mark.parametrize(
    "line",
    [
        "{}/g++ -c k.cpp",
        "ccache {}/g++ -c k.cpp",
        "nvcc -ccbin {}/g++ -c k.cpp",
        "nvcc --compiler-bindir={}/g++ -c k.cpp",
    ],
)
@pytest.mark.parametrize("names_places", [False, True])
def test_a_compiler_is_named_and_not_placed(
    place: Path, monkeypatch: pytest.MonkeyPatch, line: str, names_places: bool
) -> None:
    """Its content counts."""
    monkeypatch.setattr(commands, "_headers", lambda *given: [])
    texts = set()
    for home in ("one", "other"):
        (place / home).mkdir()
        shutil.copy("/usr/bin/g++", place / home / "g++")
        given = [line.format(place / home).split()]
        texts.add(commands.inputs_of(given, ["k.cpp"], place, place / "local", names_places).text)
    (text,) = texts
    assert "g++ " in text


def test_a_compiler_whose_content_cannot_be_told_counts_by_its_path(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_headers", lambda *given: [])
    monkeypatch.setattr(commands, "fingerprint", lambda *given: None)
    lines = ("/one/g++ -c k.cpp", "/other/g++ -c k.cpp", "nvcc -ccbin /one -c k.cpp", "nvcc -ccbin /other -c k.cpp")
    texts = {commands.inputs_of([line.split()], ["k.cpp"], place, place / "local").text for line in lines}
    assert len(texts) == 4


def test_a_compiler_beside_the_directory_that_it_runs_in_counts_by_its_content(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_headers", lambda *given: [])
    inside, compiler = place / "build", script(place / "mycc", "true")
    inside.mkdir()
    (inside / "k.cpp").touch()
    found = commands.inputs_of([["../mycc", "-c", "k.cpp"]], ["k.cpp"], inside, place / "local")
    assert [Path(each).resolve() for each in found.tools] == [Path(compiler)]


def test_a_host_compiler_counts_behind_a_wrapper_of_another_name(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_headers", lambda *given: [])
    host = script(place / "hostcc", "true")
    wrapper = script(place / "cudacc", 'exec nvcc "$@"')
    monkeypatch.setenv("NVCC_CCBIN", host)
    assert host in read(place, compiler=wrapper).tools


def test_a_path_that_looks_like_the_compiler_counts(place: Path) -> None:
    found = [read(place, f"-DCC={name}", compiler="/usr/bin/g++").text for name in ("/usr/bin/g++", "g++")]
    assert found[0] != found[1]


def test_outputs_of_an_earlier_build_are_no_tools(place: Path) -> None:
    (place / "k.o").touch()
    lines = [("g++", "-c", "k.cpp", "-o", f"{place}/k.o"), ("g++", f"{place}/k.o", "-shared", "-o", "k.so")]
    assert commands.inputs_of(lines, ["k.cpp"], place, place / "local").tools == ("g++",)


@pytest.mark.parametrize(
    "line", ["nvcc -arch=native", "nvcc --gpu-architecture native", "hipcc", "hipcc --offload-arch=native"]
)
def test_code_for_the_gpu_that_is_here_is_not_understood(place: Path, line: str) -> None:
    compiler, *flags = line.split()
    script(place / compiler, "echo k.o: k.cpp")
    with pytest.raises(ValueError, match="code for the GPU that is here"):
        read(place, *flags, compiler=str(place / compiler))


def test_the_processor_counts_where_a_flag_or_a_variable_says_native(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "native").mkdir()
    assert not read(place, f"-I{place / 'native'}").is_native
    assert read(place, "-march=native").is_native
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-Xcompiler -march=native")
    assert read(place).is_native


def test_the_time_of_the_compile_is_seen_in_flags_and_headers(place: Path) -> None:
    assert not read(place).is_timed
    assert read(place, "-DT=__TIME__").is_timed
    (place / "number.h").write_text("#define NUMBER sizeof(__DATE__)\n")
    assert read(place).is_timed
