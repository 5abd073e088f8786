"""The one rule of what is loaded: ours or root's, nobody else may write to it, and nobody else may replace what leads to it.

Each row is a real artifact with real owners and modes. Its user asks whether it is loaded, and another user tries to alter it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from kcoord.artifacts import local
from kcoord.keys.cache_key import CacheKey
from tests.support.agents import stage
from tests.support.artifacts import ORIGIN
from tests.support.mounts import mounted

US, THEM = 54322, 54321  # users, each with a group of this number

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")


class Entry(NamedTuple):
    """Owner, mode and group of a directory or a file."""

    uid: int = US
    mode: int = 0o755
    gid: int = US


class Row(NamedTuple):
    """The entries ``above/tier/home/kernel.txt``. `mount`: ``above`` is a mount point; `link`: whose link leads there."""

    loaded: bool
    above: Entry = Entry()
    tier: Entry = Entry()
    home: Entry = Entry()
    file: Entry = Entry(mode=0o644)
    mount: bool = False
    link: int | None = None


ROOTS, THEIRS = Entry(0, 0o755, 0), Entry(THEM, 0o755, THEM)
ROWS = {
    "ours": Row(True),
    "root's, as baked into an image": Row(True, ROOTS, ROOTS, ROOTS, Entry(0, 0o644, 0)),
    "private": Row(True, tier=Entry(mode=0o700)),
    "their tier": Row(False, tier=THEIRS),
    "a tier that everybody may write to": Row(False, tier=Entry(mode=0o777)),
    "a sticky tier": Row(False, tier=Entry(mode=0o1777)),
    "a tier of another group": Row(False, tier=Entry(mode=0o775, gid=THEM)),
    "a tier that another group may read": Row(True, tier=Entry(mode=0o755, gid=THEM)),
    "a tier of root's group": Row(True, tier=Entry(mode=0o775, gid=0)),
    "their home": Row(False, home=THEIRS),
    "an open home": Row(False, home=Entry(mode=0o777)),
    "their file": Row(False, file=Entry(THEM, 0o644, THEM)),
    "an open file": Row(False, file=Entry(mode=0o666)),
    "a file of root's": Row(True, file=Entry(0, 0o644, 0)),
    "below theirs": Row(False, above=THEIRS),
    "below an open one": Row(False, above=Entry(mode=0o777)),
    "below another group's": Row(False, above=Entry(mode=0o775, gid=THEM)),
    "below a sticky one of root's": Row(True, above=Entry(0, 0o1777, 0)),
    "below a sticky one of theirs": Row(False, above=Entry(THEM, 0o1777, THEM)),
    "below an open mount point of root's": Row(True, above=Entry(0, 0o777, 0), mount=True),
    "below an open mount point of theirs": Row(False, above=Entry(THEM, 0o777, THEM), mount=True),
    "behind a link of ours": Row(True, link=US),
    "behind a link of theirs": Row(False, link=THEM),
}

_ASKS = """
import json, os, sys
from pathlib import Path
from kcoord.artifacts import local
from kcoord.errors import ArtifactInvalid
os.chdir("/")
def loaded(home):
    try:
        local.check_owner(home)
        return local.open_artifact(home) is not None
    except ArtifactInvalid:
        return False
print(json.dumps([loaded(Path(home)) for home in sys.argv[1:]]))
"""


def made(root: Path, row: Row) -> Path:
    """The row's artifact. Returns the path by which its user finds it."""
    home = root / "above" / "tier" / "home"
    artifact = local.publish_local(stage(home), home, CacheKey.of("test", "k"), 1.0, ORIGIN)
    subprocess.run(["rm", "-r", home.parent / ".kcoord"], check=True)
    files = [home / artifact.manifest.files[0].name, home / local.MANIFEST_NAME]
    places = [(root / "above", row.above), (home.parent, row.tier), (home, row.home), (files[0], row.file)]
    for path, entry in [*places, (files[1], Entry(mode=0o644))]:
        os.chown(path, entry.uid, entry.gid)
        path.chmod(entry.mode)
    if row.link is None:
        return home
    (root / "link").symlink_to(root / "above")
    os.chown(root / "link", row.link, row.link, follow_symlinks=False)
    return root / "link" / "tier" / "home"


@pytest.fixture
def homes() -> Iterator[dict[str, Path]]:
    found = {}
    with ExitStack() as mounts:
        place = Path(mounts.enter_context(tempfile.TemporaryDirectory(prefix="kc-", dir="/tmp")))
        place.chmod(0o755)
        for number, (name, row) in enumerate(ROWS.items()):
            root = place / str(number)
            (root / "above").mkdir(parents=True)
            if row.mount:
                mounts.enter_context(mounted(root / "above", "-t", "tmpfs", "none"))
            found[name] = made(root, row)
        yield found


def as_user(uid: int, *command: str | Path) -> subprocess.CompletedProcess[str]:
    user = ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups"]
    return subprocess.run([*user, *command], cwd="/", capture_output=True, text=True, timeout=60, check=False)


def test_an_artifact_is_loaded_if_it_is_ours_or_roots_and_nobody_else_can_alter_it(homes: dict[str, Path]) -> None:
    done = as_user(US, sys.executable, "-c", _ASKS, *homes.values())
    if "ModuleNotFoundError" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip("no other user may read this Python")
    assert done.returncode == 0, done.stderr
    found = dict(zip(homes, json.loads(done.stdout), strict=True))
    assert found == {name: row.loaded for name, row in ROWS.items()}


def test_no_row_that_is_loaded_can_be_altered_by_another_user(homes: dict[str, Path]) -> None:
    """Else the table above would be wrong. An open mount point is for those who see the mount, which are a pod's own."""
    altered = {}
    for name, home in homes.items():
        tries = [
            ["dd", "if=/dev/zero", f"of={home}/kernel.txt", "bs=1", "count=1"], ["mv", home / "kernel.txt", home / "away"],
            ["mv", home, f"{home}.away"], ["mv", home.parent, f"{home.parent}.away"], ["rm", home.parents[1]],
        ]  # fmt: skip
        altered[name] = any(as_user(THEM, *command).returncode == 0 for command in tries)
    loaded = {name for name, row in ROWS.items() if row.loaded and not row.mount}
    assert not [name for name in loaded if altered[name]]
    assert sum(altered.values()) > 10, "the attacks work"
