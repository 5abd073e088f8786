"""Another local user, who can write to the temporary directory, and knows every name that this user's processes look for.

The attacks run as that user. They need root, which becomes another user for a moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord.artifacts import local
from kcoord.artifacts.describe import describe
from kcoord.artifacts.manifest import MANIFEST_NAME, Origin
from kcoord.artifacts.store import Store
from kcoord.backends.registry import compilers
from kcoord.errors import StoreError
from kcoord.files.private import check_tier, make_private
from kcoord.keys.cache_key import CacheKey
from kcoord.rank.client import Lead, Ready
from tests.support.agents import Node, key_of, stage
from tests.support.command import KCOORD, findings
from tests.support.interpose import find_compiler
from tests.support.sandbox import Sandbox

OTHER = 54321  # a user, and a group
SIGNER = f"ours:{'a' * 64}"

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")


def by_other(*command: str | Path) -> None:
    """Run a command as the other user."""
    subprocess.run(
        list(map(str, command)), user=OTHER, group=OTHER, extra_groups=[], cwd="/", check=True, timeout=60
    )  # fmt: skip


@pytest.fixture
def shared(sandbox: Sandbox) -> Path:
    """The temporary directory of all users, as ``/tmp``. No setting names a local directory, and this user has no home."""
    sandbox.root.chmod(0o755)
    directory = sandbox.root / "tmp"
    directory.chmod(0o1777)
    del sandbox.environment["KCOORD_LOCAL_DIR"]
    elsewhere = sandbox.root / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    sandbox.environment |= {"HOME": str(sandbox.root / "home"), "XDG_CACHE_HOME": "/proc", "KCOORD_IDLE_TIMEOUT": "20"}
    sandbox.environment["ELSEWHERE"] = str(elsewhere)
    return directory


@pytest.fixture
def usual(shared: Path) -> Path:
    """The default local directory, which nobody has made yet."""
    return shared / f"kcoord-{os.getuid()}"


_NO_OTHER = "import kcoord.default_dir as d; d._ELSEWHERE = ()\n"
_ONE_OTHER = "import os, kcoord.default_dir as d; d._ELSEWHERE = (os.environ['ELSEWHERE'],)\n"
"""The temporary directories of a program, in place of ``/tmp`` and ``/var/tmp``."""


def plant(tree: Path, place: Path) -> None:
    """The other user copies `tree`, with modes that let everybody in, to `place`."""
    subprocess.run(["chmod", "-R", "a+rX", tree], check=True)
    by_other("cp", "-r", tree, place)


def ours_for(usual: Path) -> Path:
    """The directory elsewhere, which must be this user's alone."""
    found = usual.parent.with_name("elsewhere") / usual.name
    status = found.stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.getuid(), 0o700)
    return found


# --- the default local directory ---

_MODULE = """
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "asked", "", -1, methods};
PyMODINIT_FUNC PyInit_asked(void) { return PyModule_Create(&definition); }
"""
_BUILDS = """
import sys
if "installed" in sys.argv:
    import kcoord
    print(kcoord.install())
from triton.runtime.build import compile_module_from_src
print(compile_module_from_src(%r, "asked").answer())
"""


def build(sandbox: Sandbox, cache: Path | None, answer: int, *arguments: str, **more: str) -> list[str]:
    """The lines of a process that builds a C module by Triton, or finds it in its cache, and calls it."""
    given = {"KCOORD_SPAWN": "0", **more} | ({"TRITON_CACHE_DIR": str(cache)} if cache else {})
    done = sandbox.run("-c", _ONE_OTHER + _BUILDS % (_MODULE % answer), *arguments, **given)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def evil_cache(sandbox: Sandbox) -> Path:
    """A cache of Triton's in which the module that returns 1 is one that returns 666."""
    asked, evil = (sandbox.root / "prepared" / name for name in ("triton", "evil"))
    for cache, answer in ((asked, 1), (evil, 666)):
        assert build(sandbox, cache, answer, KCOORD_DISABLE="1") == [str(answer)]
    (bait,), (module,) = (list(cache.rglob("*.so")) for cache in (asked, evil))
    shutil.copyfile(module, bait)
    assert build(sandbox, asked, 1, KCOORD_DISABLE="1") == ["666"], "Triton loads what lies under its key"
    shutil.rmtree(evil)
    return asked.parent


BACKENDS = [each.name for each in compilers() if each.modules]
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler: apt install gcc")


@needs_compiler
def test_a_module_in_a_default_directory_of_another_users_is_not_loaded(sandbox: Sandbox, usual: Path) -> None:
    pytest.importorskip("triton")
    plant(evil_cache(sandbox), usual)
    assert build(sandbox, None, 1, "installed") == [str(BACKENDS), "1"]
    assert list((ours_for(usual) / "triton").glob("*/asked*.so")), "it is shared, in a directory of this user's"


_ASKS = """
import os, subprocess, sys, kcoord
kcoord.install()
coordinator = kcoord.connect()
compiled = []
def compile(staging):
    compiled.append(1)
    (staging / "kernel").write_text("ours")
artifact = coordinator.get_or_compile(kcoord.CacheKey.of("test", "k"), compile, scope=kcoord.Scope.TARGET)
found = (artifact.path / "kernel").read_text(), len(compiled), os.environ.get("KCOORD_LOCAL_DIR")
sys.stdout.write(" ".join(map(str, found)) + "\\n")  # one call: two of these may share a pipe
sys.stdout.flush()
if "parent" in sys.argv:
    subprocess.run([sys.executable, __file__], check=True)
"""


def asks(sandbox: Sandbox) -> Path:
    path = sandbox.root / "asks.py"
    path.write_text(_ONE_OTHER + _ASKS)
    return path


def planted_artifact(prepared: Path) -> Path:
    """A local directory that holds a whole artifact under the key that `_ASKS` asks for."""
    program = (
        "import kcoord, sys; from kcoord.keys.device import current_device\n"
        "print(kcoord.CacheKey.of('test', 'k').on(current_device(), kcoord.Scope.TARGET).digest)"
    )
    digest = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    source = f"""
import sys; from pathlib import Path; import kcoord
from kcoord.artifacts import local; from kcoord.artifacts.manifest import Origin; from kcoord.keys.device import current_device
key = kcoord.CacheKey.of('test', 'k').on(current_device(), kcoord.Scope.TARGET)
home = Path({str(prepared)!r}) / "objects" / {digest!r}[:2] / {digest!r}
staging = local.new_staging(home)
(staging / "kernel").write_text("theirs")
local.publish_local(staging, home, key, 1.0, Origin.here(0, None, ""))
"""
    subprocess.run([sys.executable, "-c", source], check=True)
    return prepared


def test_an_artifact_in_a_default_directory_of_another_users_is_not_loaded(sandbox: Sandbox, usual: Path) -> None:
    plant(planted_artifact(sandbox.root / "prepared"), usual)
    done = sandbox.run_kcoord(asks(sandbox), "parent")
    assert done.returncode == 0, done.stderr
    ours = ours_for(usual)
    assert done.stdout.splitlines() == [f"ours 1 {ours}", f"ours 0 {ours}"], "a child shares the directory"
    assert done.stderr.count(f"{usual}: it belongs to user {OTHER}") == 1, done.stderr
    assert "set KCOORD_LOCAL_DIR" in done.stderr


def launch(sandbox: Sandbox, before: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
    code = f"{before}from kcoord.cli import main; main()"
    done = sandbox.run_kcoord("-c", code, "exec", "--", *command)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("taken", ["the name", "the directory around it"])
def test_a_job_and_its_ranks_share_the_directory_that_replaces_the_default_one(
    sandbox: Sandbox, usual: Path, taken: str
) -> None:
    if taken == "the name":
        by_other("mkdir", usual)
    else:
        usual.parent.chmod(0o777)
    one = f"{sys.executable} {asks(sandbox)}"
    done = launch(sandbox, _ONE_OTHER, "sh", "-c", f"{one} & {one} && wait $!")
    assert sorted(done.stdout.splitlines()) == [f"ours {n} {ours_for(usual)}" for n in (0, 1)]
    assert done.stderr.count("is used instead") == 1, done.stderr


def test_a_job_starts_although_no_directory_can_be_this_users_alone(sandbox: Sandbox, usual: Path) -> None:
    """Others may rename whatever is in its temporary directory, and take the names elsewhere."""
    usual.parent.chmod(0o777)
    done = launch(sandbox, _NO_OTHER, sys.executable, asks(sandbox))
    assert done.stdout.startswith("ours 1 ")
    assert "everybody may replace it" in done.stderr
    assert "the job runs without kcoord" in done.stderr


@pytest.mark.parametrize("leads_to", ["theirs", "ours"])
def test_a_symbolic_link_of_another_users_is_no_local_directory(sandbox: Sandbox, usual: Path, leads_to: str) -> None:
    """Also one that leads to a directory of this user's: the other user can turn it at any time."""
    target = usual.with_name("target")
    if leads_to == "theirs":
        by_other("mkdir", target)
    else:
        target.mkdir(mode=0o700)
    by_other("ln", "-s", target, usual)
    done = launch(sandbox, _ONE_OTHER, sys.executable, asks(sandbox))
    assert done.stdout.split() == ["ours", "1", str(ours_for(usual))], done.stderr
    assert f"{usual}: it is a symbolic link" in done.stderr
    assert list(target.iterdir()) == []
    named = sandbox.run_kcoord(*KCOORD, "exec", "--", "true", KCOORD_LOCAL_DIR=str(usual))
    assert named.returncode == 0
    assert f"KCOORD_LOCAL_DIR={usual}: it is a symbolic link" in named.stderr
    assert named.stderr.endswith("the job runs without kcoord\n")
    assert named.stderr.count("\n") == 1


# --- a local directory that the user named ---


def theirs(shared: Path) -> Path:
    by_other("mkdir", shared / "named")
    return shared / "named"


def below_theirs(shared: Path) -> Path:
    by_other("mkdir", "-m", "777", shared / "above")
    (shared / "above" / "named").mkdir(mode=0o700)
    return shared / "above" / "named"


def behind_their_link(shared: Path) -> Path:
    (shared / "real" / "named").mkdir(parents=True)
    by_other("ln", "-s", shared / "real", shared / "link")
    return shared / "link" / "named"


def open_to_a_group(shared: Path) -> Path:
    (shared / "named").mkdir()
    os.chown(shared / "named", -1, OTHER)
    (shared / "named").chmod(0o770)
    return shared / "named"


def below_a_groups(shared: Path) -> Path:
    above = open_to_a_group(shared)
    (above / "named").mkdir(mode=0o700)
    return above / "named"


_NAMED = {
    theirs: f"it belongs to user {OTHER}", below_theirs: f"user {OTHER}, who owns", behind_their_link: f"user {OTHER}, who owns",
    open_to_a_group: f"group {OTHER} may write to it", below_a_groups: f"group {OTHER} may replace it",
}  # fmt: skip


@pytest.mark.parametrize("make", _NAMED, ids=lambda make: make.__name__)
def test_a_named_directory_that_another_user_may_write_to_or_replace_is_not_used(
    sandbox: Sandbox, shared: Path, make: object
) -> None:
    assert callable(make)
    named = make(shared)
    code = "import os; print(os.environ.get('KCOORD_DISABLE'))"
    done = sandbox.run_kcoord(*KCOORD, "exec", "--", sys.executable, "-c", code, KCOORD_LOCAL_DIR=str(named))
    what = f"{named}: {_NAMED[make]}"  # type: ignore[index]
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr.startswith(f"kcoord: KCOORD_LOCAL_DIR={what}"), done.stderr
    assert done.stderr.endswith("set KCOORD_LOCAL_DIR to a directory of your own; the job runs without kcoord\n")
    assert done.stderr.count("\n") == 1
    rank = sandbox.run_kcoord(asks(sandbox), KCOORD_LOCAL_DIR=str(named))
    assert rank.stdout.split() == ["ours", "1", str(named)], rank.stderr
    assert not list(named.glob("objects/*")), "a rank without a launcher compiles for itself"
    with pytest.raises(StoreError):
        make_private(named)


@needs_compiler
def test_no_module_is_loaded_from_a_named_directory_of_another_users(sandbox: Sandbox, shared: Path) -> None:
    pytest.importorskip("triton")
    plant(evil_cache(sandbox), shared / "named")
    assert build(sandbox, None, 1, "installed", KCOORD_LOCAL_DIR=str(shared / "named")) == ["[]", "1"]
    inherited = {"KCOORD_LOCAL_DIR": str(shared / "named"),
                 "TRITON_CACHE_MANAGER": "kcoord.backends.triton.cache_manager:TritonCacheManager"}  # fmt: skip
    assert build(sandbox, shared / "named" / "triton", 1, **inherited) == ["1"]


def test_an_agent_does_not_start_on_another_users_directory(sandbox: Sandbox, shared: Path) -> None:
    named = theirs(shared)
    done = sandbox.run("-m", "kcoord.agent", "--fd", "0", KCOORD_LOCAL_DIR=str(named))
    assert done.returncode == 2
    assert done.stderr.startswith(f"kcoord: KCOORD_LOCAL_DIR={named}: it belongs to user {OTHER}")


# --- TRITON_CACHE_DIR ---


@contextlib.contextmanager
def signing_node(store: Path) -> Iterator[Node]:
    with Node(store=str(store), signing_key=SIGNER) as node:
        yield node


def test_an_agent_neither_takes_nor_signs_an_artifact_from_where_another_user_may_write(shared: Path) -> None:
    cache, key = shared / "cache", key_of("k")
    cache.mkdir()
    cache.chmod(0o1777)
    store = shared / "store"
    with signing_node(store) as node:
        prepared = node.directory / "prepared"
        prepared.mkdir()
        (prepared / "kernel.txt").write_text("theirs")
        staged = describe(prepared, key, 1.0, Origin.here(0, None, ""), cache / "home")
        (prepared / MANIFEST_NAME).write_bytes(staged.encoded)
        node.directory.chmod(0o755)
        plant(prepared, cache / "home")
        node.directory.chmod(0o700)
        client = node.client()
        answer = client.claim(key, cache / "home")
        assert not isinstance(answer, Ready), "it is not taken for an artifact of this node"
        assert isinstance(answer, Lead)
        staging = stage(cache / "other")
        assert not client.publish(answer, key, staging, cache / "other", 0.5, "")
        told = " ".join(node.status()["notices"])
        assert f"{cache}: everybody may write to it" in told
        assert not list(Store(store).digests())


def test_an_agent_does_not_sign_what_another_user_put_there_while_it_was_open(shared: Path) -> None:
    cache, key = shared / "cache", key_of("k")
    cache.mkdir()
    cache.chmod(0o777)
    by_other("mkdir", cache / "home")
    cache.chmod(0o755)
    with signing_node(shared / "store") as node:
        client = node.client()
        lead = client.claim(key, node.home("k"))
        assert isinstance(lead, Lead)
        (cache / "home" / "kernel.txt").write_text("theirs")
        assert not client.publish(lead, key, cache / "home", node.home("k"), 0.5, "")
        assert f"belongs to user {OTHER}" in " ".join(node.status()["notices"])


@needs_compiler
@pytest.mark.parametrize("mode", [0o1777, 0o770], ids=oct)
def test_triton_is_left_to_itself_where_another_user_may_write_to_its_cache(
    sandbox: Sandbox, shared: Path, mode: int
) -> None:
    pytest.importorskip("triton")
    cache = shared / "cache"
    cache.mkdir()
    os.chown(cache, -1, OTHER)
    cache.chmod(mode)
    program = _BUILDS % (_MODULE % 1) + "\nimport kcoord; print(kcoord.connect().counters.read()['requests'])"
    for arguments, more in (
        (["installed"], {}),
        ([], {"TRITON_CACHE_MANAGER": "kcoord.backends.triton.cache_manager:TritonCacheManager"}),
    ):
        done = sandbox.run("-c", program, *arguments, TRITON_CACHE_DIR=str(cache), KCOORD_SPAWN="0", **more)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [*([str(BACKENDS[1:])] if arguments else []), "1", "0"]
        assert done.stderr.count("may write to it") == 1, done.stderr
    assert not (cache / ".kcoord").exists()
    assert [path.suffix for path in cache.glob("*/*")] == [".so"], "Triton uses it as it does without kcoord"


def test_a_cache_behind_another_users_link_is_not_trusted_although_it_leads_to_our_local_directory(
    shared: Path,
) -> None:
    make_private(shared / "local")
    (shared / "local" / "triton").mkdir()
    by_other("ln", "-s", shared / "local", shared / "link")
    check_tier(shared / "local" / "triton")
    with pytest.raises(StoreError, match=f"user {OTHER}, who owns {shared}/link, may replace it"):
        check_tier(shared / "link" / "triton")


def test_a_launcher_leaves_triton_to_itself_and_says_so_once(sandbox: Sandbox, shared: Path) -> None:
    cache = shared / "cache"
    by_other("mkdir", cache)
    code = (
        "import json, os; print(json.dumps([os.environ.get('TRITON_CACHE_MANAGER'), os.environ['TRITON_CACHE_DIR']]))"
    )
    done = sandbox.run_kcoord(*KCOORD, "exec", "--", sys.executable, "-c", code, TRITON_CACHE_DIR=str(cache))
    assert json.loads(done.stdout) == [None, str(cache)]
    assert done.stderr.count(f"TRITON_CACHE_DIR={cache}: it belongs to user {OTHER}") == 1, done.stderr
    told = findings(sandbox, TRITON_CACHE_DIR=str(cache))
    (found,) = [each for each in told if "TRITON_CACHE_DIR" in each["finding"]]
    assert (found["what"], found["state"]) == ("triton", "warn")


def test_what_root_alone_may_write_to_is_read_by_everybody(shared: Path) -> None:
    """A cache that comes with a container's image."""
    home = shared / "cache" / "home"
    key = CacheKey.of("test", "k")
    staging = local.new_staging(home)
    (staging / "kernel").write_text("root's")
    local.publish_local(staging, home, key, 1.0, Origin.here(0, None, ""))
    subprocess.run(["chmod", "-R", "a+rX", shared / "cache"], check=True)
    code = f"""
import os; from pathlib import Path; from kcoord.keys.cache_key import CacheKey; import kcoord
import kcoord.rank.connect  # now: this Python may be in root's home
os.setgroups([]); os.setgid({OTHER}); os.setuid({OTHER})
print((kcoord.connect().find(CacheKey.of("test", "k"), Path({str(home)!r})).path / "kernel").read_text())
"""
    environment = {**os.environ, "KCOORD_LOCAL_DIR": str(shared / "mine")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "root's\n", done.stderr


@pytest.mark.parametrize("mode", [0o777, 0o770], ids=oct)
def test_torch_compile_is_left_to_itself_where_another_user_may_write_to_its_caches(
    sandbox: Sandbox, shared: Path, mode: int
) -> None:
    cache = shared / "cache"
    cache.mkdir()
    os.chown(cache, -1, OTHER)
    cache.chmod(mode)
    done = sandbox.run_kcoord("-c", "import kcoord; print(kcoord.install())", TORCHINDUCTOR_CACHE_DIR=str(cache))
    assert done.stdout == f"{[name for name in BACKENDS if name != 'inductor']}\n"
    assert "may write to it" in done.stderr
    chosen = sandbox.run_kcoord(
        "-c", "import os, kcoord; kcoord.install(); print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    )
    directory = Path(chosen.stdout.strip())
    assert directory.name == "inductor"
    assert directory.is_relative_to(sandbox.root), "in the local directory, which is private"
