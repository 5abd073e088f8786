"""Another local user where a job's umask, or an earlier version's, would leave kcoord's own directories open to all.

The local directory was made by its user, who lets others look. The attacks need root, which becomes another user for a moment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kcoord.artifacts import local
from kcoord.errors import ArtifactInvalid, KcoordError
from kcoord.keys.cache_key import CacheKey
from kcoord.profiles.parts import load_profile, save_part
from kcoord.rank.coordinator import Coordinator
from kcoord.settings import Settings
from tests.support.agents import stage
from tests.support.artifacts import ORIGIN
from tests.support.profiles import recipe
from tests.support.sandbox import Sandbox

OTHER = 54321  # a user, and a group
KEY = "ours:" + "a" * 64

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")


def by_other(*command: str | Path) -> bool:
    """True if the other user can do this."""
    words = list(map(str, command))
    done = subprocess.run(
        words, user=OTHER, group=OTHER, extra_groups=[], cwd="/", check=False, timeout=60, stderr=subprocess.DEVNULL
    )
    return done.returncode == 0


@pytest.fixture
def looked_at(sandbox: Sandbox) -> Path:
    """A local directory that everybody may read."""
    sandbox.root.chmod(0o755)
    sandbox.local.chmod(0o755)
    sandbox.environment["KCOORD_IDLE_TIMEOUT"] = "20"
    return sandbox.local


_ASKS = """
import os, sys, kcoord
os.umask(int(sys.argv[1], 8))
kcoord.install()
coordinator = kcoord.connect()
def compile(staging):
    (staging / "kernel").write_text("ours")
    (staging / "folder").mkdir()
    (staging / "folder" / "more").write_text("ours")
artifact = coordinator.get_or_compile(kcoord.CacheKey.of("test", "k"), compile, scope=kcoord.Scope.TARGET)
print((artifact.path / "kernel").read_text(), (artifact.path / "folder" / "more").read_text())
"""


def asks(sandbox: Sandbox, umask: int = 0o022, **more: str) -> subprocess.CompletedProcess[str]:
    program = sandbox.root / "asks.py"
    program.write_text(_ASKS)
    done = sandbox.run_kcoord(program, oct(umask), **more)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("umask", [0o002, 0o000], ids=oct)
@pytest.mark.parametrize("spawn", ["1", "0"], ids=["an agent publishes", "a rank publishes"])
def test_no_directory_of_kcoords_is_anybody_elses_whatever_the_umask(
    sandbox: Sandbox, looked_at: Path, umask: int, spawn: str
) -> None:
    more = {"KCOORD_SPAWN": spawn, "KCOORD_PROFILE": "p", "KCOORD_TRACE": "1"}
    assert asks(sandbox, umask, **more).stdout == "ours ours\n"
    made = [path for path in looked_at.rglob("*") if path.is_dir() and path.name != "folder"]  # that is its compiler's
    assert {looked_at / name for name in ("objects", "triton", "inductor")} < set(made)
    assert [path for path in made if path.stat().st_mode & 0o077] == []
    files = [path for path in looked_at.rglob("*") if path.is_file()]
    assert not any(by_other("test", "-w", path) for path in files)
    assert not any(by_other("flock", "--nonblock", path, "true") for path in looked_at.glob("*.lock"))


@pytest.mark.parametrize("policy", ["off", "require"])
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed again"])
@pytest.mark.parametrize("opened", ["objects", "bucket", "home", "folder"])
def test_nothing_is_loaded_that_another_user_may_write_to_or_has_written(
    sandbox: Sandbox, looked_at: Path, opened: str, closed: bool, policy: str
) -> None:
    """As an earlier kcoord left them under a umask of 0."""
    more = {"KCOORD_SPAWN": "0", **({"KCOORD_SIGNING_KEY": KEY, "KCOORD_TRUST": policy} if policy == "require" else {})}
    asks(sandbox, **more)
    (home,) = looked_at.glob("objects/??/" + "?" * 64)
    subprocess.run(["chmod", "-R", "a+rX", looked_at], check=True)
    theirs = {"objects": home.parent, "bucket": home, "home": home / "folder", "folder": home / "folder" / "more"}[
        opened
    ]
    _forge(home, sandbox.root / "forged")
    theirs.parent.chmod(0o777)
    kept = sandbox.root / "forged" / theirs.relative_to(looked_at)
    if opened in ("home", "folder"):  # the manifest is theirs, too: they had the time
        shutil.copy2(sandbox.root / "forged" / home.relative_to(looked_at) / local.MANIFEST_NAME, home)
    assert by_other("mv", theirs, theirs.with_name("away"))
    assert by_other("cp", "-r", kept, theirs)
    if closed:
        theirs.parent.chmod(0o755)
    done = asks(sandbox, **more)
    assert done.stdout == "ours ours\n", "what the other user put there has not been used"
    told = [line for line in done.stderr.splitlines() if "no agent" not in line]
    assert len(told) == 1, told
    assert f"belongs to user {OTHER}" in told[0] or "everybody may write to it" in told[0]


def _forge(home: Path, into: Path) -> None:
    """The same artifact with another content below `into`, at the same relative path."""
    forged = into / home.relative_to(home.parents[2])
    found = local.open_artifact(home)
    assert found is not None
    staging = local.new_staging(forged)
    for name in ("kernel", "folder/more"):
        (staging / name).parent.mkdir(exist_ok=True)
        (staging / name).write_text("ours" if name == "kernel" else "theirs")
    local.publish_local(staging, forged, found.manifest.key, 1.0, found.manifest.origin)
    subprocess.run(["chmod", "-R", "a+rX", into], check=True)


@pytest.mark.parametrize("name", ["triton", "inductor"])
def test_a_compiler_is_not_given_a_directory_that_another_user_may_write_to(
    sandbox: Sandbox, looked_at: Path, name: str
) -> None:
    (looked_at / name).mkdir()
    (looked_at / name).chmod(0o777)
    done = sandbox.run_kcoord("-c", "import kcoord, os; print(kcoord.install(), os.environ.get('TRITON_CACHE_DIR'))")
    assert name not in done.stdout.partition("]")[0]
    assert done.stderr.count(f"{looked_at / name}: everybody may write to it: empty it and chmod go-w") == 1, (
        done.stderr
    )


def test_open_modes_below_a_local_directory_that_nobody_else_can_enter_do_not_count(sandbox: Sandbox) -> None:
    """As an earlier kcoord left them: a job after the upgrade compiles nothing again."""
    sandbox.local.chmod(0o700)
    asks(sandbox, KCOORD_SPAWN="0")
    subprocess.run(["chmod", "-R", "a+rwX", *sandbox.local.iterdir()], check=True)
    (home,) = sandbox.local.glob("objects/??/" + "?" * 64)
    home.chmod(0o700)  # as staging always was
    made = (home / local.MANIFEST_NAME).stat().st_ino
    done = asks(sandbox, KCOORD_SPAWN="0")
    assert (done.stdout, done.stderr) == ("ours ours\n", "")
    assert (home / local.MANIFEST_NAME).stat().st_ino == made


def test_a_listed_artifact_is_not_loaded_once_others_may_write_around_it(tmp_path: Path) -> None:
    """It was verified before, and is not read again."""
    key, settings = CacheKey.of("test", "k"), Settings.from_environ({"KCOORD_LOCAL_DIR": str(tmp_path / "local")})
    home = tmp_path / "cache" / "home"
    local.publish_local(stage(home), home, key, 1.0, ORIGIN)
    coordinator = Coordinator(settings)
    try:
        assert coordinator.find(key, home) is not None
        home.chmod(0o777)
        assert coordinator.find(key, home) is None
        assert not home.exists(), "it is set aside"
    finally:
        coordinator.close()


def test_an_artifact_with_a_file_of_another_users_is_torn(tmp_path: Path) -> None:
    home = tmp_path / "home"
    artifact = local.publish_local(stage(home), home, CacheKey.of("test", "k"), 1.0, ORIGIN)
    os.chown(home / artifact.manifest.files[0].name, OTHER, OTHER)
    with pytest.raises(ArtifactInvalid, match=f"it belongs to user {OTHER}: it is not used"):
        local.open_artifact(home)


# --- profiles: their recipes name functions that are called ---


def test_recipes_are_not_read_where_another_user_may_write(tmp_path: Path) -> None:
    settings = Settings.from_environ({"KCOORD_LOCAL_DIR": str(tmp_path / "local")})
    (tmp_path / "local").mkdir(mode=0o755)
    part = save_part(tmp_path / "local" / "profiles" / "p", [recipe(1)], local_dir=settings.local_dir)
    assert load_profile(settings, "p") == [recipe(1)]
    os.chown(part, OTHER, OTHER)
    with pytest.raises(KcoordError, match="has no part that can be read"):
        load_profile(settings, "p")
    os.chown(part, os.getuid(), os.getgid())
    part.parent.chmod(0o777)
    with pytest.raises(KcoordError, match="has no part that can be read"):
        load_profile(settings, "p")
    part.parent.parent.chmod(0o777)
    with pytest.raises(KcoordError, match="everybody may write to it"):
        load_profile(settings, "p")
