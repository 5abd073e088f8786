"""Something removes the local directory while a rank compiles: a cleaner of temporary files, the epilog of another job."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kcoord
from kcoord.rank.coordinator import Coordinator
from kcoord.settings import Settings
from tests.support.sandbox import Sandbox
from tests.support.triton_ranks import fork_rank, hooked, report, totals

KEY = kcoord.CacheKey.of("test", "kernel")


@pytest.fixture
def coordinator(sandbox: Sandbox) -> Iterator[Coordinator]:
    made = Coordinator(Settings.from_environ({"KCOORD_LOCAL_DIR": str(sandbox.local)}))
    yield made
    made.close()


class Compiler:
    """Writes two files; something removes the directories around the first one in between, once."""

    def __init__(self, removed: Callable[[Path], Path], second: Callable[[Path], object]) -> None:
        self._removed, self._second, self.stagings = removed, second, list[Path]()

    def __call__(self, staging: Path) -> None:
        self.stagings.append(staging)
        (staging / "kernel.txt").write_text("the source")
        if len(self.stagings) == 1:
            shutil.rmtree(self._removed(staging))
        self._second(staging)


def write(staging: Path) -> None:
    (staging / "kernel.bin").write_text("the code")


def run_a_program(staging: Path) -> None:
    subprocess.run(["sh", "-c", 'echo "the code" >kernel.bin'], cwd=staging, check=True)


def wrap_its_error(staging: Path) -> None:
    try:
        write(staging)
    except OSError as error:
        raise RuntimeError("Error building the extension") from error


def make_its_directory(staging: Path) -> None:
    staging.mkdir(parents=True, exist_ok=True)
    write(staging)


def not_notice(staging: Path) -> None:
    if staging.exists():
        write(staging)


REMOVED = {
    "the staging directory": lambda staging: staging,
    "all staging directories": lambda staging: staging.parents[1],
    "the local directory": lambda staging: staging.parents[4],
}


@pytest.mark.parametrize(
    ("removed", "second"),
    [
        *((removed, write) for removed in REMOVED),
        *((next(iter(REMOVED)), second) for second in (run_a_program, wrap_its_error, make_its_directory, not_notice)),
    ],
)
def test_a_compile_that_loses_its_directory_is_run_once_more_in_another(
    coordinator: Coordinator, removed: str, second: Callable[[Path], object]
) -> None:
    compiler = Compiler(REMOVED[removed], second)
    artifact = coordinator.get_or_compile(KEY, compiler)
    assert (artifact.path / "kernel.txt").read_text() == "the source"
    assert (artifact.path / "kernel.bin").read_text().strip() == "the code"
    first, other = compiler.stagings
    assert first != other


def test_a_compiler_s_own_missing_file_is_an_error_at_once(coordinator: Coordinator) -> None:
    stagings = []

    def compile(staging: Path) -> None:
        stagings.append(staging)
        Path(staging, "missing").read_bytes()

    with pytest.raises(FileNotFoundError, match="missing"):
        coordinator.get_or_compile(KEY, compile)
    assert len(stagings) == 1


def test_a_directory_that_vanishes_twice_is_the_compilers_error(coordinator: Coordinator) -> None:
    def compile(staging: Path) -> None:
        shutil.rmtree(staging)
        write(staging)

    with pytest.raises(FileNotFoundError, match=r"kernel\.bin"):
        coordinator.get_or_compile(KEY, compile)


def test_a_triton_kernel_whose_staged_files_vanish_stays_with_its_process(sandbox: Sandbox) -> None:
    removed = sandbox.local / "triton" / ".kcoord"
    done = report(fork_rank(sandbox, "--kernels", "2", "--removes", removed, **hooked(sandbox, 0)))
    assert totals([done]) == (2, 0)
