"""Kernels with many keys that differ in one argument: the line that names it, by real compiles."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kcoord.artifacts.catalog import newest_first
from kcoord.artifacts.many_keys import many_keys
from kcoord.settings import Settings
from tests.support.command import KCOORD, as_json, kcoord
from tests.support.sandbox import PROGRAMS, Sandbox


def lines(sandbox: Sandbox, *arguments: str, **environment: str) -> list[str]:
    """Those of a job, without their seconds, however few these are."""
    pytest.importorskip("triton")
    name = f"tests.support.programs.{arguments[0]}"
    program = f"import runpy, sys; sys.argv = {list(arguments)!r}; runpy.run_module({name!r}, run_name='__main__')"
    done = sandbox.run_kcoord(
        *KCOORD, "exec", "--", sys.executable, "-c", program, PYTHONPATH=str(PROGRAMS.parents[2]), **environment
    )
    assert done.returncode == 0, done.stderr
    settings = Settings.from_environ({"KCOORD_LOCAL_DIR": str(sandbox.local)})
    found = many_keys(newest_first(settings), least_seconds=0.0)
    assert all(each.seconds > 0 for each in found)
    return [str(each).replace(f", {each.seconds:.1f} s,", ",") for each in found]


def test_a_rank_by_whose_value_a_kernel_is_specialized(sandbox: Sandbox) -> None:
    assert lines(sandbox, "specialized", "push") == [
        "push: 8 compiles more, since rank has 3 values (1, others, multiples of 16); "
        'triton.jit(do_not_specialize=["rank"]), unless 1 and multiples of 16 need faster code'
    ]


def test_a_length_that_is_a_constant(sandbox: Sandbox) -> None:
    assert lines(sandbox, "specialized", "sized") == [
        "sized: 12 compiles more, since n has 13 values (3, 4, 5 and 10 more); round it up, or pass it as an argument that is no "
        "tl.constexpr"
    ]


def test_types_are_no_values(sandbox: Sandbox) -> None:
    assert lines(sandbox, "specialized", "typed") == []


def test_a_tuning_key_of_many_values(sandbox: Sandbox) -> None:
    """The configurations, which are powers of two, are no mistake."""
    blocks = ",".join(str(2**n) for n in range(10))
    (line,) = lines(sandbox, "tuned", MS="3,4,5,6,7,8,9,10", BLOCKS=blocks)
    assert line.startswith("add: 7 compiles more, since its tuning key has 8 values ((3, 'float32'), (4, 'float32'), ")
    assert line.endswith("; round it up, or leave it out of the key of triton.autotune")


BUILDS = """
import time
from concurrent.futures import ThreadPoolExecutor
import kcoord
def of(n):
    def compile(staging):
        time.sleep(1)
        (staging / "kernel").write_text(str(n))
    kcoord.connect().get_or_compile(kcoord.CacheKey.of("test", "build", arguments={"n": n}, arch="sm_90"), compile)
with ThreadPoolExecutor(9) as pool:
    list(pool.map(of, range(9)))
"""


def test_a_job_and_its_report_say_so_and_a_warm_job_does_not(sandbox: Sandbox) -> None:
    begins = "build: 8 compiles more, "
    ends = " s, since n has 9 values (0, 1, 2 and 6 more); round it up, or pass it as the kernel is launched"
    for kernels in (1, 0):
        done = sandbox.run_kcoord(*KCOORD, "exec", "--job", f"j{kernels}", "--", sys.executable, "-c", BUILDS)
        said = [
            line for line in done.stderr.splitlines() if line.startswith(f"kcoord: {begins}") and line.endswith(ends)
        ]
        assert len(said) == kernels, done.stderr
    report = str(sandbox.root / "report.html")
    assert len(as_json(sandbox, "report", "j1", "-o", report)["many_keys"]) == 1
    assert begins in Path(report).read_text()
    assert as_json(sandbox, "report", "j0", "-o", report)["many_keys"] == []
    assert begins in kcoord(sandbox, "report", "j1", "-o", report).stdout
