"""The environment in a key: what changes code, read live, and nothing else."""

from __future__ import annotations

import collections
import mmap
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.keys import CacheKey
from kcoord.keys.environment import (
    REASONS,
    VARIABLES,
    Environment,
    environment_factors,
    variables,
)

FLAG = "PTXAS_OPTIONS"


@pytest.fixture(autouse=True)
def _no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (FLAG, "OTHER"):
        monkeypatch.delenv(name, raising=False)


_CHANGES: list[Callable[[], object]] = [
    lambda: os.environ.__setitem__(FLAG, "-O1"),
    lambda: os.environ.update({FLAG: "-O1"}),
    lambda: os.environ.update(PTXAS_OPTIONS="-O1", OTHER="1"),
    lambda: os.environ.setdefault(FLAG, "-O1"),
    lambda: os.environ.__ior__({FLAG: "-O1"}),
    lambda: os.environb.__setitem__(FLAG.encode(), b"-O1"),
]


@pytest.mark.parametrize("change", _CHANGES)
def test_a_change_by_any_way_moves_the_token_and_its_end_moves_it_back(change: Callable[[], object]) -> None:
    environment = Environment([FLAG])
    before = environment.token()
    with mock.patch.dict(os.environ):
        change()
        assert environment.read() == {FLAG: "-O1"}
        assert environment.token() != before
    assert environment.token() == before


_ENDS: list[Callable[[], object]] = [
    lambda: os.environ.pop(FLAG),
    lambda: os.environ.__delitem__(FLAG),
    lambda: os.unsetenv(FLAG) or os.environ.pop(FLAG),  # type: ignore[func-returns-value]
    lambda: os.environ.clear(),
    lambda: [os.environ.popitem() for _ in range(len(os.environ))],
]


@pytest.mark.parametrize("end", _ENDS)
def test_a_variable_that_is_unset_is_gone_from_the_next_look(end: Callable[[], object]) -> None:
    environment = Environment([FLAG])
    with mock.patch.dict(os.environ, {FLAG: "-O1"}):
        assert environment.read() == {FLAG: "-O1"}
        end()
        assert environment.read() == {}


def test_monkeypatch_and_patch_dict_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment([FLAG])
    with monkeypatch.context() as context:
        context.setenv(FLAG, "1")
        assert environment.read() == {FLAG: "1"}
    assert environment.read() == {}
    with mock.patch.dict(os.environ, {FLAG: "2"}, clear=True):
        assert environment.read() == {FLAG: "2"}
    assert environment.read() == {}


def test_other_variables_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment([FLAG])
    before = environment.token()
    monkeypatch.setenv("OTHER", "1")
    assert environment.token() == before


def test_unset_and_empty_differ_and_so_does_which_variable_has_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment(["A", "AB"])
    tokens = {environment.token()}
    for one in ({"A": ""}, {"A": "1"}, {"AB": "1"}, {"A": "B=1"}, {"A": "1", "AB": "1"}, {"A": "1\nAB=1"}):
        with mock.patch.dict(os.environ, one):
            assert environment.read() == one
            tokens.add(environment.token())
    assert len(tokens) == 7


def test_a_value_that_is_no_text_survives() -> None:
    environment = Environment([FLAG])
    with mock.patch.dict(os.environb, {FLAG.encode(): b"\xff=\xfe"}):
        assert os.fsencode(environment.read()[FLAG]) == b"\xff=\xfe"
        assert CacheKey.of("b", "n", **environment_factors(environment.token())).digest


_NAMES = st.sampled_from(["A", "B", "C"])
_STEPS = st.lists(st.tuples(_NAMES, st.none() | st.sampled_from(["", "0", "1"])), max_size=20)


@settings(max_examples=200, deadline=None)
@given(_STEPS)
def test_two_looks_are_equal_exactly_when_the_variables_are(steps: list[tuple[str, str | None]]) -> None:
    environment = Environment(["A", "B"])
    seen: dict[bytes, dict[str, str]] = {}
    with mock.patch.dict(os.environ):
        for name in "ABC":
            os.environ.pop(name, None)
        for name, value in steps:
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
            now = {n: os.environ[n] for n in ("A", "B") if n in os.environ}
            token = environment.token()
            assert variables(token) == now
            assert seen.setdefault(token, now) == now
    assert len({tuple(sorted(s.items())) for s in seen.values()}) == len(seen)


class StandIn(collections.UserDict[str, str]):
    """A mapping that is no `os._Environ`; its `_data` must not be taken for one's."""

    _data = {b"PTXAS_OPTIONS": b"wrong"}  # noqa: RUF012 - not a field


@pytest.mark.parametrize("make", [dict, StandIn], ids=["a dict", "a mapping with _data"])
def test_a_stand_in_for_os_environ_is_read_by_its_public_interface(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[dict[str, str]], dict[str, str]]
) -> None:
    environment = Environment([FLAG])
    plain = environment.token()
    other = make({FLAG: "-O1"})
    with monkeypatch.context() as context:
        context.setattr(os, "environ", other)
        assert environment.read() == {FLAG: "-O1"}
        other[FLAG] = "-O2"
        assert environment.read() == {FLAG: "-O2"}
        stood_in = environment.token()
    assert environment.token() == plain
    with mock.patch.dict(os.environ, {FLAG: "-O2"}):
        assert environment.token() == stood_in, "both ways of reading say the same"


def test_without_cpythons_bytes_the_public_interface_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment([FLAG])

    class Other(dict[bytes, bytes]):
        pass

    with mock.patch.dict(os.environ, {FLAG: "-O1"}), monkeypatch.context() as context:
        context.setattr(os.environ, "_data", Other(os.environ._data))  # type: ignore[attr-defined]
        assert environment.read() == {FLAG: "-O1"}
        os.environ[FLAG] = "-O2"
        assert environment.read() == {FLAG: "-O2"}


def test_every_thread_sees_its_own_change_at_once() -> None:
    names = [f"OF_THREAD_{n}" for n in range(16)]
    environment = Environment(names)
    wrong: list[str] = []
    start = threading.Barrier(len(names))

    def change(name: str) -> None:
        start.wait(timeout=30)
        for number in range(300):
            os.environ[name] = str(number)
            os.environ["OTHER"] = name
            found = environment.read().get(name)
            if found != str(number):
                wrong.append(f"{name} is {number}, and {found} was read")

    with mock.patch.dict(os.environ):
        threads = [threading.Thread(target=change, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert environment.read() == dict.fromkeys(names, "299")


def test_a_difference_reads_as_a_variable_that_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment(VARIABLES["triton"])
    before = CacheKey.of("b", "n", **environment_factors(environment.token()))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    after = CacheKey.of("b", "n", **environment_factors(environment.token()))
    assert [str(d) for d in before.diff(after)] == ["env TRITON_DISABLE_LINE_INFO: unset → 1"]
    assert before.digest != after.digest


def test_every_variable_has_a_reason_and_no_whitelist_holds_a_place_that_a_tool_is_keyed_by() -> None:
    assert all(reason for reasons in REASONS.values() for reason in reasons.values())
    for backend, names in VARIABLES.items():
        assert names >= {"NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"}, backend
        assert not names & {"PATH", "TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH", "TRITON_CACHE_DIR", "RANK"}, backend


# Of Triton's own knobs, those that change no kernel.
_NEUTRAL = {
    "where files lie": {"TRITON_HOME", "TRITON_CACHE_DIR", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR"},
    "who caches": {
        "TRITON_CACHE_MANAGER", "TRITON_REMOTE_CACHE_BACKEND", "TRITON_REDIS_KEY_FORMAT", "TRITON_REDIS_HOST",
        "TRITON_REDIS_PORT", "TRITON_CACHE_AUTOTUNING", "TRITON_ALWAYS_COMPILE",
    },
    "kernels that are overridden are not shared": {"TRITON_KERNEL_OVERRIDE"},
    "what is printed or dumped": {
        "TRITON_KERNEL_DUMP", "TRITON_PRINT_AUTOTUNING", "TRITON_FRONT_END_DEBUGGING", "TRITON_DUMP_PTXAS_LOG",
    },
    "keyed by content": {
        "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_LIBDEVICE_PATH", "TRITON_HIP_LLD_PATH",
        "TRITON_AMD_CODEGEN_PATH",
    },
    "tools that only show": {"TRITON_CUOBJDUMP_PATH", "TRITON_NVDISASM_PATH"},
    "the launcher, not the kernel": {
        "CC", "TRITON_CUDACRT_PATH", "TRITON_CUDART_PATH", "TRITON_LIBCUDA_PATH", "TRITON_LIBHIP_PATH",
    },
    "nothing is compiled": {"TRITON_INTERPRET"},
}  # fmt: skip


def test_every_knob_of_triton_is_keyed_or_known_to_be_neutral() -> None:
    knobs = pytest.importorskip("triton.knobs")
    found = {
        descriptor.key
        for section in vars(knobs).values()
        if isinstance(section, knobs.base_knobs) and section is not knobs.proton
        for descriptor in section.knob_descriptors.values()
    }
    assert found - VARIABLES["triton"] == found & set().union(*_NEUTRAL.values())


_PREFIXES = b"TRITON AMDGCN LLVM MLIR NVPTX PTXAS DISABLE ENABLE USE ALLOW STORE PREFER WARP".split()


def test_what_triton_itself_says_to_invalidate_its_cache_is_keyed() -> None:
    libtriton = pytest.importorskip("triton._C.libtriton")
    with Path(libtriton.__file__).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        texts = re.findall(rb"\0((?:%b)_\w{3,60})(?=\0)" % b"|".join(_PREFIXES), content)
    names = {text.decode() for text in texts} | VARIABLES["triton"]
    program = (
        "import os, sys; os.environ.update(dict.fromkeys(sys.stdin.read().split(), '1'));"
        "[os.environ.pop(n, None) for n in ('TRITON_PLUGIN_PATHS', 'LLVM_PASS_PLUGIN_PATH')];"
        "import importlib.util as u; s = u.spec_from_file_location('libtriton', sys.argv[1]); m = u.module_from_spec(s);"
        "s.loader.exec_module(m); print(*m.get_cache_invalidating_env_vars())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(libtriton.__file__)],
        input=" ".join(names), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    listed = set(done.stdout.split())
    assert len(listed) >= 30
    assert listed <= VARIABLES["triton"]
