"""The live key of a call: the same for the same, another for another, by 16 threads and without a lock."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kcoord
from tests.support.sandbox import Sandbox

TARGET = kcoord.Scope.TARGET
SIZE = 1
consts = types.ModuleType("consts_of_live_key")
consts.DEPTH = 3  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _here(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("KCOORD_LOCAL_DIR", str(sandbox.local))
    yield
    kcoord.connect().close()


def scale(x: int) -> int:
    return x * SIZE


@kcoord.compile_once(scope=TARGET, on_drift="rekey")
def build(x: int, y: float = 2.0, *rest: int, mode: str = "fast", staging: Path, **more: int) -> None:
    (staging / "kernel").write_text(f"{scale(x)} {y} {rest} {mode} {more} {consts.DEPTH}")


def text(*args: Any, **kwargs: Any) -> str:
    return (build(*args, **kwargs).path / "kernel").read_text()  # type: ignore[no-any-return]


def test_a_default_that_is_spelled_out_makes_no_other_key() -> None:
    assert build.key(1).digest == build.key(1, 2.0, mode="fast").digest == build.key(x=1, y=2.0).digest


def test_a_call_that_does_not_fit_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="missing"):
        build()
    with pytest.raises(TypeError, match="multiple values"):
        build(1, x=2)


def test_parameters_of_every_kind_keep_their_places() -> None:
    assert text(1, 5.0, 7, 8, mode="m", extra=9) == "1 5.0 (7, 8) m {'extra': 9} 3"

    @kcoord.compile_once(scope=TARGET)
    def positional(a: int, b: int = 2, /, c: int = 3, *, d: int = 4, staging: Path) -> None:
        (staging / "kernel").write_text(f"{a}{b}{c}{d}")

    assert (positional(1, 9, d=5).path / "kernel").read_text() == "1935"


def test_what_a_compile_writes_into_its_own_tree_is_no_error_and_nothing_is_published(sandbox: Sandbox) -> None:
    tree = sandbox.root / "templates"
    tree.mkdir()

    @kcoord.compile_once(scope=TARGET, trees=[tree], ignore=["tree"])
    def writes(*, staging: Path) -> None:
        (tree / ".cache").write_text("last run")
        (staging / "kernel").write_text("x")

    assert (writes().path / "kernel").read_text() == "x"
    assert not list(sandbox.local.rglob("kcoord-manifest.msgpack"))
    assert (writes().path / "kernel").read_text() == "x"
    assert list(sandbox.local.rglob("kcoord-manifest.msgpack")), "now the tree is as it was when the key was made"


def test_two_trees_of_one_name_count_both(sandbox: Sandbox) -> None:
    trees = [sandbox.root / part / "templates" for part in ("one", "two")]
    for tree in trees:
        tree.mkdir(parents=True)
        (tree / "kernel.h").write_text("text")

    @kcoord.compile_once(scope=TARGET, trees=trees)
    def uses(*, staging: Path) -> None:
        (staging / "kernel").write_text("x")

    digests = [uses.key().digest]
    for tree in trees:
        (tree / "kernel.h").write_text("another text")
        digests.append(uses.key().digest)
    assert len(set(digests)) == 3


class Plain:
    def __init__(self, tile: int) -> None:
        self.tile = tile

    def factor(self) -> int:
        return 1

    @kcoord.compile_once(scope=TARGET)
    def make(self, x: int, *, staging: Path) -> None:
        (staging / "kernel").write_text(f"{x * self.factor() * self.tile}")


class Sub(Plain):
    def factor(self) -> int:
        return 10 * SIZE


def made(builder: Any, x: int) -> str:
    return (builder.make(x).path / "kernel").read_text()  # type: ignore[no-any-return]


def test_what_only_a_subclass_reads_is_watched_like_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(Sub(6), 3) == "180"
    monkeypatch.setattr(sys.modules[__name__], "SIZE", 2)
    with pytest.raises(kcoord.GlobalsDrift, match=r"SIZE: 1 → 2"):
        made(Sub(7), 3)


def test_an_object_of_which_not_all_can_be_told_has_no_method_with_a_key() -> None:
    class Opaque(threading.local):
        @kcoord.compile_once(scope=TARGET)
        def make(self, *, staging: Path) -> None:
            (staging / "kernel").write_text(repr(self))

    with pytest.raises(kcoord.KeyFactorError, match=r"arguments\.self.*__cache_signature__"):
        Opaque().make()


def test_sixteen_threads_get_no_wrong_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread asks for its own arguments while another changes a global back and forth: every key is one of two."""
    expected = {}
    for size in (1, 2):
        monkeypatch.setattr(sys.modules[__name__], "SIZE", size)
        for n in range(64):
            expected[n] = (*expected.get(n, ()), build.key(n, mode="t").digest)
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            sys.modules[__name__].SIZE = random.choice((1, 2))  # type: ignore[attr-defined]

    def ask(seed: int) -> int:
        choose, wrong = random.Random(seed), 0
        for _ in range(400):
            n = choose.randrange(64)
            wrong += build.key(n, mode="t").digest not in expected[n]
        return wrong

    changer = threading.Thread(target=change)
    changer.start()
    try:
        with ThreadPoolExecutor(16) as pool:
            assert sum(pool.map(ask, range(16))) == 0
    finally:
        stop.set()
        changer.join()


def test_the_hit_path_takes_no_lock() -> None:
    """Everything that a warm key calls, seen by the profiler: no lock among it, and nothing of the slow path."""
    build.key(1)
    called: list[str] = []

    def profile(frame: types.FrameType, event: str, argument: Any) -> None:
        called.append(frame.f_code.co_name if event == "call" else getattr(argument, "__name__", ""))

    sys.setprofile(profile)
    try:
        build.key(1)
    finally:
        sys.setprofile(None)
    assert not {"acquire", "release", "__enter__", "__exit__", "content_of", "_make", "open"} & set(called)
    assert {"made", "token"} <= set(called)


def test_a_fork_goes_on_with_what_it_knows() -> None:
    build.key(1)
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r}); "
    script += "import tests.unit.keys.test_live_key as t, os\n"
    script += "k = t.build.key(1).digest\npid = os.fork()\nd = t.build.key(1).digest\nassert d == k\n"
    script += "os._exit(0) if not pid else sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_key_says_what_it_is_made_of() -> None:
    names = {f.name: {p.name for p in f.parts} for f in build.key(1).factors}
    assert {"x", "y", "rest", "mode", "more"} == names["arguments"]
    assert any(n.endswith("test_live_key.scale") for n in names["code"])
    assert any(n.endswith("test_live_key.SIZE") for n in names["globals"])
    assert "consts_of_live_key.DEPTH" in names["globals"]


_memo: dict[int, int] = {}


@pytest.mark.parametrize("on_drift", ["raise", "rekey"])
def test_a_function_that_changes_what_it_reads_is_told_what_helps(on_drift: Any) -> None:
    @kcoord.compile_once(scope=TARGET, on_drift=on_drift)
    def remembers(x: int, *, staging: Path) -> None:
        _memo[x] = x + len(_memo)
        (staging / "kernel").write_text(str(_memo[x]))

    with pytest.raises(kcoord.GlobalsDrift, match=r"_memo: .*changes what it reads itself.*ignore=") as caught:
        remembers(len(_memo))
    assert "rekey" not in str(caught.value), "it does not help there"


def test_a_function_without_staging_has_no_live_key_to_ask_for() -> None:
    with pytest.raises(kcoord.KeyFactorError, match="staging"):
        kcoord.compile_once()(lambda: None)


def test_on_drift_is_one_of_two_words() -> None:
    with pytest.raises(kcoord.KeyFactorError, match="rekey"):
        kcoord.compile_once(on_drift="ignore")  # type: ignore[arg-type]
