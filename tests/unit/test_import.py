"""Importing kcoord costs next to nothing."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest


def loaded_by(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint(*sys.modules, sep='\\n')"
    return set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )


@pytest.mark.parametrize(
    "statement", ["import kcoord", "import kcoord; kcoord.connect; kcoord.CacheKey; kcoord.install"]
)
def test_importing_kcoord_imports_no_torch_triton_or_redis(statement: str) -> None:
    assert not {"torch", "triton", "redis", "asyncio", "numpy"} & loaded_by(statement)


def test_the_agent_imports_neither_compilers_nor_what_few_agents_need() -> None:
    modules = loaded_by("import kcoord.agent.__main__, kcoord.leases.redis")
    assert "redis" in modules
    assert not {"torch", "triton", "numpy", "psutil", "prometheus_client", "http.server"} & modules


@pytest.mark.serial
def test_importing_kcoord_takes_less_than_50_ms_more_than_python_itself() -> None:
    def seconds(statement: str) -> float:
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        return time.perf_counter() - begun

    seconds("import kcoord")  # writes the bytecode
    empty, with_kcoord = (min(seconds(s) for _ in range(7)) for s in ("pass", "import kcoord"))
    assert with_kcoord - empty < 0.050
