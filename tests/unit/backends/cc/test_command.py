"""Command lines that a compiler launcher may share, and those that it must run as they are."""

from __future__ import annotations

import pytest

from kcoord.backends.cc.command import Dependencies, understood


@pytest.mark.parametrize(
    "line",
    [
        "g++ -c a.cpp -o build/a.o",
        "g++ -O2 -I include -isystem /usr/x -DX=1 -c a.cpp",
        "clang -x c++ -std=c++20 -Xclang -fno-x -S a.c -o a.s",
        "nvcc -arch=sm_90a -gencode arch=compute_90,code=sm_90 -Xcompiler -fPIC -dc a.cu -o a.o",
        "nvcc a.cu -cubin -o /tmp/x/kernel.cubin --ptxas-options=--verbose --compiler-options -fPIC",
    ],
)
def test_a_command_that_compiles_a_source_is_understood(line: str) -> None:
    command = understood(line.split())
    assert command is not None
    assert "-o" not in command.canonical


@pytest.mark.parametrize(
    "line",
    [
        "g++ a.cpp -o program",
        "g++ a.o -shared -o a.so",
        "g++ -E a.cpp",
        "g++ -M -c a.cpp",
        "g++ -c -",
        "g++ -c a.cpp -o",
        "g++ -c a.cpp -save-temps",
        "g++ -c a.cpp --coverage",
        "g++ -c a.cpp -gsplit-dwarf",
        "g++ -c a.cpp -fprofile-use=x",
        "g++ -c a.cpp b.cpp",
        "g++ -c a.cpp -MF a.d",
        "g++ -c a.cpp -S",
        "g++ -c a.cpp @flags",
        "g++ -c a.cpp strange",
        "g++ -B /opt/tools -c a.cpp",
        "g++ -v -c a.cpp",
        "g++ -c a.cpp -o -",
        "g++ -c a.cpp -o /dev/null",
        "g++ -c a.cpp -MD -MF /dev/null",
        "g++ -c a.cpp -o .",
        "g++ -c a.cpp -fsyntax-only",
        "g++ -c a.cpp -fopt-info-vec=notes",
        "gcc -c a.c -x c++",
        "gcc -c a.s",
        "nvcc -c a.cu -Xcompiler --coverage",
        "nvcc -c a.cu -Xcompiler=-O2,-save-temps",
        "nvcc --keep -c a.cu",
        "nvcc -dlink a.o -o b.o",
        "nvcc --version",
        "nvcc",
    ],
)
def test_any_other_command_runs_as_it_is(line: str) -> None:
    assert understood(line.split()) is None


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("-MD", Dependencies("-MD", "out/a.d", ("out/a.o",), False)),
        ("-MMD -MP -MF deps", Dependencies("-MMD", "deps", ("out/a.o",), True)),
        ("-MD -MT one -MT two", Dependencies("-MD", "out/a.d", ("one", "two"), False)),
        ("-MD -MQ $(x)", Dependencies("-MD", "out/a.d", ("$$(x)",), False)),
        ("", None),
    ],
)
def test_the_rule_for_make_is_where_the_compiler_would_write_it(more: str, expected: Dependencies | None) -> None:
    command = understood(["g++", "-c", "a.cpp", "-o", "out/a.o", *more.split()])
    assert command is not None
    assert command.dependencies == expected


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("-g", True),
        ("-g3", True),
        ("-ggdb", True),
        ("-lineinfo", True),
        ("-G", True),
        ("-Xcompiler=-O2,-g", True),
        ("-g0", False),
        ("-O2", False),
    ],
)
def test_debug_information_names_the_directory(flag: str, names: bool) -> None:
    command = understood(["g++", flag, "-c", "a.cpp"])
    assert command is not None
    assert command.names_places is names


@pytest.mark.parametrize(
    ("variable", "value", "runs"),
    [
        ("NVCC_APPEND_FLAGS", "--keep", True),
        ("DEPENDENCIES_OUTPUT", "rules", True),
        ("NVCC_APPEND_FLAGS", "-O2", False),
    ],
)
def test_a_variable_that_asks_for_more_files_is_as_the_flag(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, runs: bool
) -> None:
    monkeypatch.setenv(variable, value)
    assert (understood(["nvcc", "-c", "a.cu"]) is None) is runs


def test_an_output_without_a_name_is_that_of_the_compiler() -> None:
    for flag, name in (("-c", "a.o"), ("-S", "a.s"), ("-ptx", "a.ptx")):
        command = understood(["nvcc", flag, "x/a.cu"])
        assert command is not None
        assert command.output == name
