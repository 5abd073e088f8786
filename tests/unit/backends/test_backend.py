"""The way of a request through `Backend`, where a compiler, its loader or kcoord itself goes wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import kcoord
from kcoord.artifacts.local import Artifact
from kcoord.backends import UNLOADED, Backend, Bypassed, Request
from kcoord.backends.fail_open import notices
from kcoord.errors import KeyFactorError
from kcoord.rank import directories
from kcoord.rank.coordinator import Coordinator
from tests.support.cluster import fill
from tests.support.mounts import mounted
from tests.support.sandbox import Sandbox


class Toy(Backend[str, str]):
    """A request is a source; a handle names how it was made."""

    name = "toy"

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def label(self, request: str) -> str:
        return f"kernel {request}"

    def factors(self, request: str) -> Mapping[str, Any]:
        return {"source": request}

    def required(self, request: str) -> tuple[str, ...]:
        return ("code",)

    def compile(self, request: str, staging: Path) -> str:
        self.compiled.append(request)
        (staging / "code").write_text(request)
        return f"built {request}"

    def load(self, request: str, artifact: Artifact) -> str:
        return f"loaded {(artifact.path / 'code').read_text()}"


class Forgetful(Toy):
    """It loads for each request."""

    keeps_handles = False


def native() -> str:
    return "native"


def never() -> str:
    raise AssertionError("kcoord should have answered")


@pytest.fixture(autouse=True)
def coordinator(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    monkeypatch.setattr(notices, "_told", {})
    monkeypatch.setenv("KCOORD_LOCAL_DIR", str(sandbox.local))
    made = kcoord.connect()
    yield made
    made.close()


def told() -> str:
    return "\n".join(notices.since(0)[0])


def test_the_leader_keeps_the_handle_that_it_built_and_others_load() -> None:
    toy = Toy()
    assert [toy.obtain("a", never) for _ in range(2)] == ["built a", "built a"]
    assert Forgetful().obtain("a", never) == "loaded a"
    assert toy.compiled == ["a"]


def test_a_compiler_that_builds_no_handle_has_its_artifact_loaded() -> None:
    class Silent(Toy):
        def compile(self, request: str, staging: Path) -> str:
            super().compile(request, staging)
            found: str = UNLOADED
            return found

    assert Silent().obtain("a", never) == "loaded a"


def test_a_request_that_is_bypassed_or_has_no_key_is_left_to_the_compiler() -> None:
    class Dumping(Toy):
        def bypass(self, request: str) -> str:
            return "it is dumped"

    class Keyless(Toy):
        def factors(self, request: str) -> Mapping[str, Any]:
            return {"source": object()}

    assert Dumping().obtain("a", native) == "native"
    assert Dumping().begin("a") == Bypassed("it is dumped")
    assert told() == ""
    assert Keyless().obtain("a", native) == "native"
    assert "kernel a is compiled by each rank for itself" in told()


def test_an_error_of_a_step_is_told_and_the_compiler_answers() -> None:
    class Faulty(Toy):
        def adjust(self, request: str, wanted: Request) -> Request:
            raise ZeroDivisionError("a bug")

    assert Faulty().obtain("a", native) == "native"
    assert "please report it: ZeroDivisionError" in told()


@pytest.mark.parametrize("when", ["before it compiles", "while it compiles"])
def test_a_compiler_that_no_disk_takes_files_of_answers_as_without_kcoord(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    class Writing(Toy):
        def compile(self, request: str, staging: Path) -> str:
            fill(disk)
            (staging / "code").write_bytes(b"x" * (1 << 20))
            return "built"

    with mounted(sandbox.root / "disk", "-t", "tmpfs", "-o", "size=8m,mode=0700", "kcoord-test") as disk:
        monkeypatch.setenv("KCOORD_LOCAL_DIR", str(disk))
        monkeypatch.setattr(directories, "private_places", lambda: [disk])
        if when == "before it compiles":
            fill(disk)
        assert Writing().obtain("a", native) == "native"
        kcoord.connect().close()
    assert "kcoord stands aside" in told()
    assert "please report it" not in told()


def test_an_artifact_that_does_not_load_is_left_to_the_compiler_and_stays() -> None:
    class Unloadable(Forgetful):
        def load(self, request: str, artifact: Artifact) -> str:
            raise OSError("undefined symbol")

    Toy().obtain("a", never)
    assert Unloadable().obtain("a", native) == "native"
    assert "does not load: OSError: undefined symbol" in told()
    assert Forgetful().obtain("a", never) == "loaded a"


def test_what_a_rank_has_compiled_and_cannot_load_is_left_to_the_compiler() -> None:
    class Unloadable(Toy):
        def compile(self, request: str, staging: Path) -> str:
            super().compile(request, staging)
            found: str = UNLOADED
            return found

        def load(self, request: str, artifact: Artifact) -> str:
            raise OSError("undefined symbol")

    toy = Unloadable()
    assert toy.obtain("a", native) == "native"
    assert toy.compiled == ["a"]
    assert "does not load: OSError: undefined symbol" in told()


def test_an_artifact_that_lacks_a_file_is_neither_published_nor_loaded() -> None:
    class Two(Forgetful):
        def required(self, request: str) -> tuple[str, ...]:
            return ("code", "host")

    assert Two().obtain("a", never) == "built a"
    assert Forgetful().obtain("a", never) == "built a", "what Two made is not there"
    assert Two().obtain("a", native) == "native"
    assert "it has no host" in told()


def test_the_compilers_exception_is_raised_here_and_in_a_rank_that_comes_later() -> None:
    class Wrong(Toy):
        def compile(self, request: str, staging: Path) -> str:
            raise SyntaxError("the compiler's own words")

    for _ in range(2):
        with pytest.raises(SyntaxError, match="own words"):
            Wrong().obtain("a", never)


def test_inputs_that_moved_during_the_compile_are_not_shared() -> None:
    class Moving(Forgetful):
        def unchanged(self, request: str) -> bool:
            return False

    assert Moving().obtain("a", never) == "built a"
    assert Toy().obtain("a", never) == "built a"


def test_switched_off_it_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KCOORD_DISABLE", "1")
    assert Toy().obtain("a", native) == "native"


def test_one_that_callers_use_by_name_raises_what_a_hook_works_around() -> None:
    class Explicit(Toy):
        raises_errors = True

        def factors(self, request: str) -> Mapping[str, Any]:
            return {"source": object()}

    with pytest.raises(KeyFactorError):
        Explicit().obtain("a", never)


def test_a_warm_up_has_it_there_unloaded() -> None:
    toy = Toy()
    assert [toy.prepare("a", waits=True) for _ in range(2)] == ["compiled", "loaded"]
    assert kcoord.connect().counters.read()["local_hits"] == 0
