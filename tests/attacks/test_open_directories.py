"""Another local user where a job's umask, or an earlier version's, would leave kcoord's own directories open to all.

The local directory was made by its user, who lets others look. The attacks need root, which becomes another user for a moment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kcoord.artifacts import local
from kcoord.errors import ArtifactInvalid, KcoordError
from kcoord.keys.cache_key import CacheKey
from kcoord.packs.recipe_files import load_profile, save_part
from kcoord.rank.coordinator import Compilation, Coordinator, Request
from kcoord.settings import Settings
from tests.support.agents import stage
from tests.support.artifacts import ORIGIN
from tests.support.interpose import find_compiler
from tests.support.mounts import mounted, read_only
from tests.support.profiles import recipe
from tests.support.sandbox import PROGRAMS, Sandbox

OTHER = 54321  # a user, and a group
KEY = "ours:" + "a" * 64

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler: apt install gcc")
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


@pytest.mark.parametrize(
    ("opened", "closed", "policy"),
    [
        *((opened, closed, "off") for opened in ("objects", "bucket", "home", "folder") for closed in (False, True)),
        ("folder", True, "require"),
    ],
)
def test_nothing_is_loaded_that_another_user_may_write_to_or_has_written(
    sandbox: Sandbox, looked_at: Path, opened: str, closed: bool, policy: str
) -> None:
    """As an earlier kcoord left them under a umask of 0."""
    more = {"KCOORD_SPAWN": "0", **({"KCOORD_SIGNING_KEY": KEY, "KCOORD_TRUST": policy} if policy == "require" else {})}
    asks(sandbox, **more)
    (home,) = looked_at.rglob("objects/??/" + "?" * 64)
    tier = home.parents[2]
    subprocess.run(["chmod", "-R", "a+rX", looked_at], check=True)
    theirs = {"objects": home.parent, "bucket": home, "home": home / "folder", "folder": home / "folder" / "more"}[
        opened
    ]
    _forge(home, sandbox.root / "forged")
    theirs.parent.chmod(0o777)
    kept = sandbox.root / "forged" / theirs.relative_to(tier)
    if opened in ("home", "folder"):  # the manifest is theirs, too: they had the time
        shutil.copy2(sandbox.root / "forged" / home.relative_to(tier) / local.MANIFEST_NAME, home)
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


def test_a_large_artifact_of_another_users_is_not_sent_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are opened when they are sent, one by one."""
    monkeypatch.setattr(local, "LARGEST_IN_MEMORY", 1)
    key, home = CacheKey.of("test", "k"), tmp_path / "home"
    artifact = local.publish_local(stage(home), home, key, 1.0, ORIGIN)
    name = home / artifact.manifest.files[0].name
    found = local.contents_at(home, key.digest)
    assert found is not None
    assert callable(found[1])
    found[1](found[0].files[0]).close()
    os.chown(name, OTHER, OTHER)
    for attempt in (lambda: found[1](found[0].files[0]), lambda: local.open_artifact(home)):
        with pytest.raises(ArtifactInvalid, match=f"{name}: it belongs to user {OTHER}"):
            attempt()
    os.chown(name, os.getuid(), os.getgid())
    os.chown(home / local.MANIFEST_NAME, OTHER, OTHER)
    with pytest.raises(ArtifactInvalid, match=f"{local.MANIFEST_NAME}: it belongs to user {OTHER}"):
        local.contents_at(home, key.digest)
    os.chown(home, OTHER, OTHER)
    with pytest.raises(ArtifactInvalid, match=f"{home}: it belongs to user {OTHER}"):
        local.contents_at(home, key.digest)


# --- user namespaces ---


_AS_USER = """
import ctypes, os, sys
from pathlib import Path
import kcoord, kcoord.rank.connect, kcoord.backends.registry  # now: this Python may be in root's home
from kcoord.keys.cache_key import CacheKey
uid, maps, homes = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
os.setgroups([]); os.setgid(uid); os.setuid(uid)
if maps:
    ctypes.CDLL(None, use_errno=True).prctl(4, 1, 0, 0, 0)  # it is dumpable: its own map may be written
    if ctypes.CDLL(None).unshare(0x10000000):
        sys.exit("no user namespaces here")
    if maps != "none":
        Path("/proc/self/uid_map").write_text(maps)
coordinator = kcoord.connect()
print(os.geteuid(), *(coordinator.find(CacheKey.of("test", "k"), Path(home)) is not None for home in homes))
coordinator.get_or_compile(CacheKey.of("test", "other"), lambda staging: (staging / "kernel").write_text("ours"))
print(coordinator.settings.local_dir)
"""


def as_user(sandbox: Sandbox, uid: int, maps: str, *homes: Path) -> tuple[list[str], Path, str]:
    """What this user's coordinator finds, its local directory, and what it said."""
    environment = sandbox.env(KCOORD_LOCAL_DIR=None, KCOORD_SPAWN="0", HOME="/nowhere")
    command = [sys.executable, "-c", _AS_USER, str(uid), maps, *map(str, homes)]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60)
    if "no user namespaces" in done.stderr:
        pytest.skip("no user namespaces here")
    assert done.returncode == 0, done.stderr
    found, local_dir = done.stdout.splitlines()
    return found.split(), Path(local_dir), done.stderr


@pytest.fixture
def homes(sandbox: Sandbox) -> list[Path]:
    """Artifacts of the user 65534, of `OTHER`, and of root, in directories that everybody may read."""
    sandbox.root.chmod(0o755)
    (sandbox.root / "tmp").chmod(0o1777)
    found = []
    for uid in (65534, OTHER, 0):
        home = sandbox.root / "tmp" / f"of-{uid}" / "home"
        local.publish_local(stage(home), home, CacheKey.of("test", "k"), 1.0, ORIGIN)
        subprocess.run(["chmod", "-R", "a+rX", home.parent], check=True)
        subprocess.run(["chown", "-R", f"{uid}:{uid}", home.parent], check=True)
        found.append(home)
    return found


def test_without_a_map_of_users_nothing_is_loaded_since_everybody_is_one_user(
    sandbox: Sandbox, homes: list[Path]
) -> None:
    planted = sandbox.root / "tmp" / "kcoord-65534"
    planted.mkdir(mode=0o755)
    os.chown(planted, OTHER + 1, -1)
    found, local_dir, said = as_user(sandbox, OTHER, "none", *homes)
    assert found == ["65534", "False", "False", "False"]
    assert said.count(f"{local_dir}: it belongs to user 65534, whom this user namespace does not map") == 1, said
    beside = [path.name for path in planted.parent.iterdir() if path.name.startswith(planted.name)]
    assert beside == [planted.name], "no names are tried"
    assert list(planted.iterdir()) == []


def test_the_user_65534_that_is_mapped_is_a_user(sandbox: Sandbox, homes: list[Path]) -> None:
    """A pod with ``runAsUser: 65534``, and a rootless container."""
    found, local_dir, said = as_user(sandbox, 65534, "", *homes)
    assert found == ["65534", "True", "False", "True"]
    assert list(local_dir.glob("objects/??/*/kernel")), said
    assert "belongs to user 65534" not in said
    found, local_dir, said = as_user(sandbox, OTHER, f"1000 {OTHER} 1", *homes)
    assert found == ["1000", "False", "True", "False"], "root and 65534 are not mapped, and look alike"
    assert list(local_dir.glob("objects/??/*/kernel")), said


# --- a cache directory that its user named ---


def modes(cache: Path) -> set[str]:
    return {f"{path.stat().st_mode & 0o777:o}" for path in cache.rglob("*") if ".kcoord" not in path.parts}


@pytest.mark.parametrize("umask", [0o000, 0o077], ids=oct)
def test_artifacts_in_a_named_directory_have_the_modes_that_its_compiler_would_give_them(
    sandbox: Sandbox, umask: int
) -> None:
    """But for the right of others to write. Of an agent's fetch, of its publish, and of a rank's."""
    cache = sandbox.root / "cache"
    program = f"""
import os; from pathlib import Path; from kcoord.artifacts import local; from kcoord.keys.cache_key import CacheKey
from kcoord.artifacts.manifest import Origin
import kcoord
os.umask({umask})
key, cache, named = CacheKey.of("test", "k"), Path({str(cache)!r}), Path({str(sandbox.local)!r})
coordinator = kcoord.connect()
from kcoord.rank.coordinator import Request
compilation = coordinator.request(Request(key, cache / "made"))
(compilation.staging / "folder").mkdir()
(compilation.staging / "folder" / "kernel").write_text("ours")
made = compilation.publish()
assert made.path == cache / "made", made
local.install(made.manifest, local.read_contents(made), cache / "fetched", named)
"""
    for spawn in ("0", "1"):
        sandbox.environment["KCOORD_IDLE_TIMEOUT"] = "5"
        done = sandbox.run("-c", program, KCOORD_SPAWN=spawn)  # not forked: its agent is to have its umask
        assert done.returncode == 0, done.stderr
        stock = {f"{0o777 & ~(umask | 0o022):o}", f"{0o666 & ~(umask | 0o022):o}"}
        assert modes(cache) == stock
        assert [path.stat().st_mode & 0o777 for path in (cache / ".kcoord", cache / ".kcoord" / "staging")] == [
            0o700
        ] * 2
        assert {path.name for path in cache.iterdir()} == {".kcoord", "made", "fetched"}
        shutil.rmtree(cache)


_BUILDS = f"""
import sys, kcoord
kcoord.install()
sys.path.insert(0, {str(PROGRAMS)!r})
import kernels
for factor in sys.argv[1:]:
    kernels.build_scale(int(factor))
found = kcoord.connect().counters.read()
print(*(found[name] for name in ("requests", "compiles", "local_hits")))
"""


@needs_compiler
def test_kernels_that_root_baked_into_an_image_are_loaded_by_its_user_and_others_are_compiled_once_a_node(
    sandbox: Sandbox,
) -> None:
    """``RUN train.py --compile`` with ``TRITON_CACHE_DIR=/opt/kernels``, then ``USER 1000``."""
    pytest.importorskip("triton")
    sandbox.root.chmod(0o755)
    (sandbox.root / "tmp").chmod(0o1777)
    cache = sandbox.root / "kernels"
    baked = sandbox.run("-c", _BUILDS, "2", "3", TRITON_CACHE_DIR=str(cache), KCOORD_SPAWN="0")
    assert baked.stdout == "2 2 0\n", baked.stderr
    home = sandbox.root / "tmp" / "home"
    assert by_other("mkdir", home)
    environment = sandbox.env(
        TRITON_CACHE_DIR=str(cache), KCOORD_LOCAL_DIR=str(home / "local"), HOME=str(home), KCOORD_SPAWN="0"
    )

    def job(*factors: str) -> str:
        user = ["setpriv", "--reuid", str(OTHER), "--regid", str(OTHER), "--clear-groups", sys.executable]
        if subprocess.run([*user, "-c", "import triton"], cwd="/", check=False, capture_output=True).returncode:
            pytest.skip("no other user may read this Python")
        command = [*user, "-c", _BUILDS, *factors]
        done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "kernels" not in done.stderr.replace("kernels are compiled without coordination", ""), done.stderr
        return done.stdout.strip()

    assert job("2", "3") == "2 0 2"
    assert job("2", "3", "4", "5") == "4 2 2"
    assert job("2", "3", "4", "5") == "4 0 4"


def test_a_kernel_that_a_read_only_directory_does_not_take_is_compiled_once_a_node(sandbox: Sandbox) -> None:
    key, settings = CacheKey.of("test", "k"), Settings.from_environ(sandbox.env(KCOORD_SPAWN="0"))
    cache = sandbox.root / "cache"
    baked = CacheKey.of("test", "baked")
    local.publish_local(stage(cache / "baked"), cache / "baked", baked, 1.0, ORIGIN)
    with mounted(cache, "--bind", str(cache)):
        read_only(cache)
        for rank in range(2):
            coordinator = Coordinator(settings)
            try:
                assert isinstance(coordinator.request(Request(baked, cache / "baked")), local.Artifact)
                found = coordinator.request(Request(key, cache / "k"))
                if isinstance(found, Compilation):
                    assert rank == 0
                    (found.staging / "kernel").write_text("ours")
                    found = found.publish()
                assert found.path.is_relative_to(sandbox.local)
                assert not [told for told in coordinator.notices.since(0)[0] if "no agent" not in told]
            finally:
                coordinator.close()


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
