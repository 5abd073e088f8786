"""A clean environment for every test; who runs what when several workers share the suite; the time that each folder took."""

from __future__ import annotations

import collections
import compileall
import gc
import inspect
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from kcoord.testing.leases import bounded
from tests.support import interpose, toolchain
from tests.support.environment import is_foreign
from tests.support.forked import fork_agents
from tests.support.fuzzing import LONG, USUAL
from tests.support.interpose import Interposer
from tests.support.processes import WITH_KCOORD
from tests.support.sandbox import Sandbox, sandboxed
from tests.support.shared_servers import ForkServers, fork_server

ROOT = Path(__file__).resolve().parents[1]
settings.register_profile("long", max_examples=LONG * USUAL)
_LONGEST = [
    ROOT / "tests" / name
    for name in (
        "node/test_donation.py", "node/test_slim_images.py", "node/test_torch_compile.py", "node/test_pool.py", "stale",
        "docs/test_tutorial.py", "cluster/proof", "unit/agent/test_flights_model.py", "unit/leases/test_redis_model.py",
        "faults/test_redis.py", "faults/test_partitions.py", "node/test_warmup.py", "node/test_workers.py", "chaos",
    )
]  # fmt: skip
_WORKERS_PER_CORE = 2.5  # more than half of a test's time is waiting


def pytest_configure(config: pytest.Config) -> None:
    """Undo what a caller's shell forbids: signals (under nohup, and in a script's background) and bytecode.

    Hundreds of tests start processes that import kcoord. Each would compile it again, which is half of its start.
    """
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    sys.dont_write_bytecode = False
    gc.disable()  # what the collection of tests makes stays
    fork_agents(lambda: fork_server((WITH_KCOORD,)).address)
    if not hasattr(config, "workerinput"):
        toolchain.begin()
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="kc-cache-", dir="/tmp")
        config.add_cleanup(lambda: shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True))
        servers = ForkServers()
        os.environ.update(servers.variables)
        config.add_cleanup(servers.close)
        for package in ("kcoord", "launch", "tests"):
            compileall.compile_dir(ROOT / package, quiet=2)


def pytest_collection_finish() -> None:
    gc.freeze()  # no later collection looks at it
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        toolchain.end()


def pytest_xdist_auto_num_workers() -> int:
    """``-n auto``."""
    return max(1, round(_WORKERS_PER_CORE * len(os.sched_getaffinity(0))))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a module's fixture run on one worker, so that it is made once (``--dist loadgroup``)."""
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "unit"):
            item.add_marker(pytest.mark.unit)
        shared = [name for name in getattr(item, "fixturenames", ()) if _of_a_module(item, name)]
        if shared and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """The longest begin first."""
    return next((turn for turn, path in enumerate(_LONGEST) if item.path.is_relative_to(path)), len(_LONGEST))


def _of_a_module(item: pytest.Item, name: str) -> bool:
    definitions = item.session._fixturemanager.getfixturedefs(name, item) or ()
    return any(each.scope == "module" and each.baseid for each in definitions)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An ``async def`` test runs in an event loop of its own, within the bound of `bounded`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    bounded(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """A report that xdist can send: a lone surrogate in it, from a fuzzed message, would end the whole run."""
    return _encodable((yield))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(name): _encodable(each) for name, each in value.items()}
    return type(value)(map(_encodable, value)) if type(value) in (list, tuple) else value


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The seconds of each folder's tests, waits included: with several workers more than the whole run took."""
    seconds: collections.Counter[str] = collections.Counter()
    tests: collections.Counter[str] = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = str(Path(report.nodeid.partition("::")[0]).parent)
                seconds[folder] += report.duration
                tests[folder] += report.when == "call"
    terminalreporter.section("seconds of each folder")
    for folder, spent in seconds.most_common():
        terminalreporter.write_line(f"{spent:8.1f} s {tests[folder]:6} tests  {folder}")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if is_foreign(name):
            monkeypatch.delenv(name)


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with sandboxed() as box:
        yield box


@pytest.fixture(scope="session")
def interposing_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if interpose.find_compiler() is None:
        pytest.skip("no C compiler: apt install gcc")
    return interpose.build(tmp_path_factory.mktemp("interpose"))


@pytest.fixture
def interposer(interposing_library: Path, tmp_path: Path) -> Interposer:
    return Interposer(interposing_library, tmp_path)
