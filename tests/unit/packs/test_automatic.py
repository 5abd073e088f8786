"""Names of profiles that nobody gave: found again by what a job runs, and forgotten when there are many."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kcoord.errors import KcoordError
from kcoord.packs import automatic
from kcoord.packs.automatic import automatic_name, is_automatic, nearest, of_command, of_script, superfluous
from kcoord.packs.recipe import Recipe
from kcoord.packs.recipe_files import forget_superfluous, load_profile, save_part
from kcoord.settings import NO_PROFILE, Settings, profile_name


def recipe(name: str) -> Recipe:
    return Recipe("triton", "kernels", name, {}, "cuda:90", 1.0, 0)


@pytest.mark.parametrize("entry", ["train", "my-train.v2", "x" * 99, "pretrain_ü", "", "a.b.c"])
@pytest.mark.parametrize("ranks", [0, 8, 10**9])
def test_every_script_has_a_name_that_a_profile_may_have(entry: str, ranks: int) -> None:
    name = automatic_name(entry, ranks, b"content")
    assert profile_name(name) == name
    assert is_automatic(name)


def test_names_that_people_give_are_not_automatic() -> None:
    assert not any(map(is_automatic, ("llama-8b", "auto-train", "auto-train.8", NO_PROFILE, None)))


def test_a_job_finds_its_own_profile_else_the_latest_of_its_script_and_ranks() -> None:
    mine = automatic_name("train", 8, b"edited")
    same_ranks, other_ranks = automatic_name("train", 8, b"before"), automatic_name("train", 16, b"edited")
    older, other = automatic_name("train", 8, b"long ago"), automatic_name("finetune", 8, b"edited")
    times = {mine: 1.0, same_ranks: 3.0, other_ranks: 9.0, older: 2.0, other: 9.0, "train": 9.0}
    for expected in (mine, same_ranks, older, other_ranks, None):
        assert nearest(mine, times) == expected
        times.pop(expected or "", None)
    assert nearest("llama-8b", {"llama-8b-2": 1.0}) is None


def test_only_the_latest_automatic_profiles_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "KEPT", 2)
    names = [automatic_name("train", ranks) for ranks in range(4)]
    for at, name in enumerate([*names, "named"]):
        save_part(tmp_path / name, [recipe("f")])
        os.utime(tmp_path / name, (at, at))
    assert superfluous({name: float(at) for at, name in enumerate([*names, "named"])}) == names[:2]
    forget_superfluous(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names[2:], "named"])


def test_a_profile_of_an_edited_script_is_read_for_the_script_as_it_is(tmp_path: Path) -> None:
    settings = Settings.from_environ({"KCOORD_LOCAL_DIR": str(tmp_path)})
    tmp_path.chmod(0o700)
    save_part(tmp_path / "profiles" / automatic_name("train", 8, b"before"), [recipe("f")])
    assert [r.qualname for r in load_profile(settings, automatic_name("train", 8, b"after"))] == ["f"]
    with pytest.raises(KcoordError, match="there is no profile"):
        load_profile(settings, automatic_name("finetune", 8))


def test_a_launchers_command_is_named_by_its_script_or_module(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    found = of_command(["torchrun", "--nproc-per-node", "8", str(script), "--steps", "9"], 8)
    assert found == of_script(str(script), 8) == automatic_name("train", 8, b"print(1)")
    assert of_command(["python", "-m", "my.train"], 2) == automatic_name("my.train", 2)
    assert of_command(["./train.sh"], 2) is None
    assert of_command(["python", "gone.py"], 0) == automatic_name("gone", 0)


PRINTS = "from kcoord.rank.connect import connect; print(connect().settings.profile)"


@pytest.mark.parametrize(
    ("arguments", "entry"), [(["-c", PRINTS], None), (["-m", "prints"], "prints"), (["prints.py"], "prints")]
)
def test_a_process_is_named_by_its_main_module(tmp_path: Path, arguments: list[str], entry: str | None) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    environment = {**os.environ, "KCOORD_LOCAL_DIR": str(tmp_path / "local"), "WORLD_SIZE": "4", "RANK": "0"}
    environment.pop("KCOORD_PROFILE", None)
    done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
    expected = NO_PROFILE if entry is None else automatic_name(entry, 4, PRINTS.encode())
    assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize("file", ["/usr/bin/kcoord", "/x/kcoord-torchrun"])
def test_programs_of_kcoord_record_nothing(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=file, __spec__=None))
    assert automatic.of_this_process(1) == NO_PROFILE
    spec = SimpleNamespace(name="kcoord.replay.__main__")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=file, __spec__=spec))
    assert automatic.of_this_process(1) == NO_PROFILE


def test_a_worker_of_ray_runs_any_job_and_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    file = "/x/site-packages/ray/_private/workers/default_worker.py"
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=file, __spec__=None))
    assert automatic.of_this_process(1) == NO_PROFILE
