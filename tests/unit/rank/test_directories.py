"""Directories of artifacts to which others may write: nothing is loaded from there, and a look is not repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcoord.artifacts import local
from kcoord.artifacts.manifest import Origin
from kcoord.keys.cache_key import CacheKey
from kcoord.rank import directories
from kcoord.rank.coordinator import Compilation, Coordinator, Request
from kcoord.rank.directories import Directories
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices

KEY = CacheKey.of("test", "k")


def settings_of(tmp_path: Path) -> Settings:
    return Settings.from_environ({"KCOORD_LOCAL_DIR": str(tmp_path / "local"), "KCOORD_SPAWN": "0"})


def test_a_directory_is_looked_at_once_whatever_is_asked_for_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    look = directories.check_tier

    def counted(tier: Path) -> None:
        looks.append(tier.name)
        look(tier)

    monkeypatch.setattr(directories, "check_tier", counted)
    notices = Notices()
    tiers = Directories(settings_of(tmp_path), notices)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name in ("a", "b"):
        for bucket in ("00", "01"):
            assert tiers.is_private(tmp_path / "local" / "objects" / bucket / name)
        assert tiers.is_private(str(tmp_path / "cache" / name))
        assert not tiers.is_private(tmp_path / "open" / name)
    assert looks == ["00", "01", "cache", "open"]
    (told,) = notices.since(0)[0]
    assert told.startswith(f"{tmp_path / 'open'}: everybody may write to it: empty it and chmod go-w, or choose a")


def test_an_artifact_where_others_may_write_is_compiled_for_this_process_alone(tmp_path: Path) -> None:
    home = tmp_path / "open" / "home"
    staging = local.new_staging(home)
    (staging / "kernel").write_text("theirs")
    local.publish_local(staging, home, KEY, 1.0, Origin.here(0, None, ""))
    (tmp_path / "open").chmod(0o777)
    coordinator = Coordinator(settings_of(tmp_path))
    try:
        assert coordinator.find(KEY, home) is None
        found = coordinator.request(Request(KEY, home))
        assert isinstance(found, Compilation)
        assert found.lead is None, "nobody else is to wait for it"
        (found.staging / "kernel").write_text("ours")
        artifact = found.publish()
        assert (artifact.path / "kernel").read_text() == "ours"
        assert not artifact.path.is_relative_to(tmp_path / "open")
        assert (home / "kernel").read_text() == "theirs", "nothing of others is moved"
    finally:
        coordinator.close()
