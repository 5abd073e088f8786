"""The local tier: artifacts on the node's own disk, in their compiler's own layout."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kcoord.artifacts import local
from kcoord.artifacts.local import Artifact
from kcoord.artifacts.manifest import HOME_PLACEHOLDER, MANIFEST_NAME, Manifest, Origin
from kcoord.errors import ArtifactInvalid, ArtifactUnreadable, StoreError
from kcoord.files import private
from kcoord.keys import CacheKey

KEY = CacheKey.of("test", "kernel", source="x")
OTHER = CacheKey.of("test", "kernel", source="y")
ORIGIN = Origin("host", 1, 0, "cuda:90#0", 1.7e9)
FILES = {"kernel.cubin": b"\x7fELF" + bytes(range(256)), "kernel.json": b'{"name": "k"}', "sub/lib.so": b"code"}
GROUP = json.dumps({"child_paths": {"kernel.cubin": f"{HOME_PLACEHOLDER.decode()}/kernel.cubin"}}).encode()


def stage(home: Path, files: dict[str, bytes] = FILES) -> Path:
    staging = local.new_staging(home)
    for name, content in files.items():
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).write_bytes(content)
    return staging


def published(home: Path, files: dict[str, bytes] = FILES, key: CacheKey = KEY) -> Artifact:
    return local.publish_local(stage(home, files), home, key, 2.0, ORIGIN)


def left_in(home: Path, what: str) -> list[Path]:
    directory = home.parent / ".kcoord" / what
    return sorted(directory.iterdir()) if directory.exists() else []


def test_what_is_published_while_it_is_looked_for_is_not_taken_for_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, read, looked = tmp_path / "artifact", local.read_plain, []

    def late(path: str, most: int, **how: Any) -> bytes:
        looked.append(path)
        if len(looked) > 1:
            return read(path, most, **how)
        try:
            return read(path, most, **how)
        finally:
            published(home)  # by another rank, between our look and whatever follows from it

    monkeypatch.setattr(local, "read_plain", late)
    assert local.open_artifact(home, KEY.digest) is None
    assert local.open_artifact(home, KEY.digest) is not None
    assert left_in(home, "quarantine") == []


def test_what_is_not_there_is_no_artifact(tmp_path: Path) -> None:
    assert local.open_artifact(tmp_path / "missing") is None
    assert local.open_artifact(tmp_path / "missing" / "deeper") is None
    (tmp_path / "file").write_text("x")
    assert local.open_artifact(tmp_path / "file") is None
    (tmp_path / "empty").mkdir()
    assert local.open_artifact(tmp_path / "empty") is None


def _truncate(home: Path) -> None:
    os.truncate(home / "kernel.cubin", 100)


def _flip(home: Path) -> None:
    content = bytearray((home / "sub/lib.so").read_bytes())
    content[2] ^= 1
    (home / "sub/lib.so").write_bytes(content)


def _grow(home: Path) -> None:
    with (home / "kernel.json").open("ab") as file:
        file.write(b" ")


def _replace_by_directory(home: Path) -> None:
    (home / "kernel.json").unlink()
    (home / "kernel.json").mkdir()


def _dangling_link(home: Path) -> None:
    (home / "kernel.json").unlink()
    (home / "kernel.json").symlink_to("nowhere")


def _looping_link(home: Path) -> None:
    (home / "kernel.json").unlink()
    (home / "kernel.json").symlink_to("kernel.json")


def _foreign_manifest(home: Path) -> None:
    other = published(home.parent / "other", FILES, OTHER)
    (home / MANIFEST_NAME).write_bytes((other.path / MANIFEST_NAME).read_bytes())


@pytest.mark.parametrize(
    "damage",
    [
        _truncate, _flip, _grow, _replace_by_directory, _dangling_link, _looping_link, _foreign_manifest,
        lambda home: (home / "kernel.cubin").unlink(), lambda home: (home / "sub/lib.so").unlink(),
        lambda home: os.truncate(home / MANIFEST_NAME, 50), lambda home: os.truncate(home / MANIFEST_NAME, 0),
        lambda home: (home / MANIFEST_NAME).write_bytes(b"\x80"),
    ],
)  # fmt: skip
def test_a_damaged_artifact_is_refused(tmp_path: Path, damage: object) -> None:
    home = tmp_path / "artifact"
    published(home)
    damage(home)  # type: ignore[operator]
    with pytest.raises(ArtifactInvalid):
        local.open_artifact(home, KEY.digest)
    assert not local.is_whole(home, KEY.digest)


def test_reading_to_send_checks_once_more(tmp_path: Path) -> None:
    artifact = published(tmp_path / "artifact")
    _flip(artifact.path)
    with pytest.raises(ArtifactInvalid):
        local.read_contents(artifact)
    (artifact.path / "sub/lib.so").unlink()
    with pytest.raises(ArtifactInvalid):
        local.read_contents(artifact)


@pytest.mark.parametrize("name", [MANIFEST_NAME, "kernel.json"])
@pytest.mark.parametrize(
    ("fault", "refusal"), [(errno.EIO, ArtifactInvalid), (errno.EMFILE, ArtifactUnreadable)], ids=["disk", "process"]
)
def test_an_artifact_that_cannot_be_read_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: int, refusal: type[ArtifactInvalid]
) -> None:
    """A failing disk fails for others too; too many open files are this process's own trouble."""
    home, read = tmp_path / "artifact", local.read_plain
    artifact = published(home)

    def fails(path: str, most: int, **how: Any) -> bytes:
        if path.endswith(name):
            raise OSError(fault, os.strerror(fault), path)
        return read(path, most, **how)

    monkeypatch.setattr(local, "read_plain", fails)
    for attempt in (lambda: local.open_artifact(home), lambda: local.contents_at(home, KEY.digest)):
        with pytest.raises(ArtifactInvalid, match="cannot be read") as caught:
            attempt()
        assert type(caught.value) is refusal
    assert not local.is_whole(home, KEY.digest)
    if name != MANIFEST_NAME:
        with pytest.raises(ArtifactUnreadable, match="cannot be read"):
            local.read_contents(artifact)


def test_an_artifact_that_this_host_remembers_wrongly_is_read_once_more_from_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, read = tmp_path / "artifact", local.read_plain
    artifact = published(home)

    def remembered(path: str, most: int, **how: Any) -> bytes:
        content = read(path, most, **how)
        return content if how["afresh"] or path.endswith(MANIFEST_NAME) else bytes(len(content))

    monkeypatch.setattr(local, "read_plain", remembered)
    assert local.open_artifact(home, KEY.digest) == artifact
    assert local.contents_at(home, KEY.digest) == (artifact.manifest, FILES)


# --- relocatable files ---


def test_a_group_file_names_the_files_where_they_are_published(tmp_path: Path) -> None:
    home = tmp_path / 'odd "name" \\ here'
    artifact = published(home, {**FILES, "group.json": GROUP})
    paths = json.loads((home / "group.json").read_bytes())["child_paths"]
    assert Path(paths["kernel.cubin"]).read_bytes() == FILES["kernel.cubin"]
    assert local.read_contents(artifact)["group.json"] == GROUP
    assert [e.name for e in artifact.manifest.files if e.relocatable] == ["group.json"]


def test_the_placeholder_in_a_file_that_is_no_json_is_left_alone(tmp_path: Path) -> None:
    artifact = published(tmp_path / "artifact", {"kernel.bin": b"x" + HOME_PLACEHOLDER})
    assert (artifact.path / "kernel.bin").read_bytes() == b"x" + HOME_PLACEHOLDER


def test_files_that_could_not_be_published_can_be_adopted_where_they_are(tmp_path: Path) -> None:
    home = tmp_path / ("long" * 64)
    staging = stage(home, {**FILES, "group.json": GROUP})
    with pytest.raises(StoreError, match="use a shorter one"):
        local.publish_local(staging, home, KEY, 1.0, ORIGIN)
    assert (staging / "group.json").read_bytes() == GROUP, "the staged files are as they were"
    artifact = local.adopt(staging, KEY, 1.0, ORIGIN)
    assert artifact.path == staging
    paths = json.loads((staging / "group.json").read_bytes())["child_paths"]
    assert Path(paths["kernel.cubin"]).read_bytes() == FILES["kernel.cubin"]
    assert left_in(home, "staging") == [staging]


def test_adopting_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactInvalid):
        local.adopt(tmp_path, KEY, 1.0, ORIGIN)
    with pytest.raises(ArtifactInvalid):
        local.adopt(tmp_path / "missing", KEY, 1.0, ORIGIN)


def test_files_that_cannot_be_read_are_not_adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = stage(tmp_path / "artifact")

    def fails(path: Path, most: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr("kcoord.artifacts.describe.read_plain", fails)
    with pytest.raises(ArtifactInvalid, match="cannot be read"):
        local.adopt(staging, KEY, 1.0, ORIGIN)


def test_an_artifact_that_vanishes_right_after_it_was_installed_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = published(tmp_path / "there")
    home, rename = tmp_path / "here", local.rename_into_place

    def cleaned(staging: Path, final: Path, *rest: Any, **how: Any) -> bool:
        won = rename(staging, final, *rest, **how)
        shutil.rmtree(final)
        return won

    monkeypatch.setattr(local, "rename_into_place", cleaned)
    with pytest.raises(StoreError, match="does something clean"):
        local.install(there.manifest, local.read_contents(there), home)


def test_a_copy_that_is_not_what_was_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = published(tmp_path / "there")
    contents, write = local.read_contents(there), local.write_files
    broken = {**contents, "kernel.json": b"{}"}
    monkeypatch.setattr(local, "write_files", lambda directory, _, **how: write(directory, broken, **how))
    with pytest.raises(StoreError, match="does not verify"):
        local.install(there.manifest, contents, tmp_path / "here")


# --- what is staged ---


def _link_to_file(staging: Path) -> None:
    (staging / "link").symlink_to("/etc/passwd")


def _link_to_directory(staging: Path) -> None:
    (staging / "link").symlink_to("/etc")


def _link_within(staging: Path) -> None:
    (staging / "link").symlink_to("kernel.json")


@pytest.mark.parametrize(
    "plant", [_link_to_file, _link_to_directory, _link_within, lambda staging: os.mkfifo(staging / "sub" / "pipe")]
)
def test_links_and_pipes_in_staging_are_refused(tmp_path: Path, plant: object) -> None:
    home = tmp_path / "artifact"
    staging = stage(home)
    plant(staging)  # type: ignore[operator]
    with pytest.raises(ArtifactInvalid, match="neither a plain file nor a directory"):
        local.publish_local(staging, home, KEY, 1.0, ORIGIN)
    assert not home.exists()


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "artifact"
    staging = stage(home)
    Path(os.fsdecode(bytes(staging) + b"/\xff.bin")).write_bytes(b"x")
    with pytest.raises(ArtifactInvalid, match="UTF-8"):
        local.publish_local(staging, home, KEY, 1.0, ORIGIN)
    assert not home.exists()


def test_what_no_manifest_may_state_is_refused_before_it_is_published(tmp_path: Path) -> None:
    home = tmp_path / "artifact"
    staging = stage(home)
    deep = staging.joinpath(*"d" * 33)
    deep.mkdir(parents=True)
    (deep / "file").touch()
    with pytest.raises(ArtifactInvalid, match="too deep"):
        local.publish_local(staging, home, KEY, 1.0, ORIGIN)
    assert not home.exists()


def test_a_manifest_that_the_compiler_left_is_replaced(tmp_path: Path) -> None:
    artifact = published(tmp_path / "artifact", {**FILES, MANIFEST_NAME: b"junk"})
    assert [e.name for e in artifact.manifest.files] == sorted(FILES)
    assert Manifest.decode((artifact.path / MANIFEST_NAME).read_bytes()) == artifact.manifest


# --- quarantine ---


def test_an_invalid_artifact_is_moved_aside_and_kept(tmp_path: Path) -> None:
    home = tmp_path / "artifact"
    published(home)
    _flip(home)
    local.quarantine(home)
    assert not home.exists()
    (kept,) = left_in(home, "quarantine")
    assert (kept / "kernel.cubin").exists()
    local.quarantine(home)  # another process was faster


def test_a_reader_of_a_quarantined_artifact_reads_on(tmp_path: Path) -> None:
    home = tmp_path / "artifact"
    published(home)
    with (home / "kernel.cubin").open("rb") as reader:
        local.quarantine(home)
        assert reader.read() == FILES["kernel.cubin"]


# --- directories ---


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's directory")
def test_another_users_directory_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    with pytest.raises(StoreError, match="set KCOORD_LOCAL_DIR"):
        private.make_private(tmp_path / "theirs")


def test_a_file_where_the_directory_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError):
            private.make_private(path)


def test_a_quota_that_no_call_shows_is_found_by_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = local.new_staging(tmp_path / "artifact")
    assert local.takes_files(staging, 1)
    assert not local.takes_files(staging, 1 << 60)
    assert not local.takes_files(staging.with_name("missing"), 1)

    def over_quota(path: Path, content: bytes) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(Path, "write_bytes", over_quota)
    assert not local.takes_files(staging, 1)
    assert left_in(tmp_path / "artifact", "staging") == [staging]


_KILLED_WHILE_PUBLISHING = """
import os, signal, sys
from pathlib import Path
from kcoord.artifacts import local
from kcoord.files import beneath
from tests.unit.artifacts.test_local_tier import KEY, ORIGIN, stage, GROUP, FILES
home = Path(sys.argv[1])
staging = stage(home, {**FILES, "group.json": GROUP})
rename = beneath.rename
beneath.rename = lambda source, *a: os.kill(os.getpid(), signal.SIGKILL) if source.is_dir() else rename(source, *a)
local.publish_local(staging, home, KEY, 1.0, ORIGIN)
"""


def test_a_publisher_that_is_killed_before_its_rename_leaves_nothing_at_the_final_name(tmp_path: Path) -> None:
    home = tmp_path / "artifact"
    done = subprocess.run(
        [sys.executable, "-c", _KILLED_WHILE_PUBLISHING, str(home)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert local.open_artifact(home) is None
    (staging,) = left_in(home, "staging")
    artifact = local.publish_local(staging, home, KEY, 1.0, ORIGIN)  # as its rank does
    assert local.read_contents(artifact) == {**FILES, "group.json": GROUP}


def test_directories_above_a_named_cache_that_are_made_are_not_open_whatever_the_umask(tmp_path: Path) -> None:
    local_dir = tmp_path / "local"
    local_dir.mkdir(mode=0o700)
    before = os.umask(0)
    try:
        local.new_staging(tmp_path / "image" / "kernels" / "ABC", local_dir=local_dir)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("image", "image/kernels")] == [0o755, 0o755]


# --- right after its agent has published it ---


def test_what_was_published_and_is_gone_torn_or_another_keys_is_not_had(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert local.published(home, KEY.digest) is None
    published(home)
    with pytest.raises(ArtifactInvalid, match="another key"):
        local.published(home, "0" * 64)
    next(path for path in home.iterdir() if path.name != MANIFEST_NAME and path.is_file()).unlink()
    assert local.published(home, KEY.digest) is None
    (home / MANIFEST_NAME).write_bytes(b"torn")
    with pytest.raises(ArtifactInvalid):
        local.published(home, KEY.digest)


def test_what_was_published_and_others_may_write_to_is_not_had(tmp_path: Path) -> None:
    home = tmp_path / "home"
    published(home)
    home.chmod(0o755)
    next(path for path in home.iterdir() if path.name != MANIFEST_NAME and path.is_file()).chmod(0o666)
    with pytest.raises(ArtifactInvalid, match="it is not used"):
        local.published(home, KEY.digest)
