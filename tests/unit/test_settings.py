"""Settings: one line that names the setting and the remedy, and never a password."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from kcoord import default_dir, mounts
from kcoord.errors import SettingsError
from kcoord.redis_url import Nodes, Sentinels
from kcoord.settings import FIELDS, Settings, unknown_variables, variable

SECRET = "tr0ub4dor"


def refusal(environ: dict[str, str] | None = None, **flags: str | None) -> str:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environ(environ or {}, **flags)
    line = str(caught.value)
    assert line.isprintable(), "it is one line"
    assert caught.value.__suppress_context__ or caught.value.__context__ is None, (
        "a traceback would show the value again"
    )
    return line


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("KCOORD_LEASE_TTL", "-1", "positive number of seconds"),
        ("KCOORD_LEASE_TTL", "0", "positive number of seconds"),
        ("KCOORD_LEASE_TTL", "nan", "positive number of seconds"),
        ("KCOORD_LEASE_TTL", "fifteen", "positive number of seconds"),
        ("KCOORD_MAX_WAIT", "99999999999", "positive number of seconds"),
        ("KCOORD_FAILURE_TTL", "\n", "positive number of seconds"),
        ("KCOORD_MEMORY_ENTRIES", "0", "whole number"),
        ("KCOORD_MEMORY_ENTRIES", "1.5", "whole number"),
        ("KCOORD_SPAWN", "maybe", "1 or 0"),
        ("KCOORD_DISABLE", "2", "1 or 0"),
        ("KCOORD_NAMESPACE", "", "letters, digits"),
        ("KCOORD_NAMESPACE", "a:b", "letters, digits"),
        ("KCOORD_NAMESPACE", "x" * 65, "1 to 64"),
        ("KCOORD_PROFILE", "..", "must not begin with '.'"),
        ("KCOORD_PROFILE", "a/b", "letters, digits"),
        ("KCOORD_STORE", "store", "write the whole path, from / or ~: a relative one would be another directory"),
        ("KCOORD_STORE", "./store", "write the whole path"),
        ("KCOORD_STORE", "~nobody-of-this-name/store", "write the whole path"),
        ("KCOORD_SOCKET", "/tmp/" + "x" * 120, "shorten it"),
        ("KCOORD_REDIS_URL", "redis.example", "redis://"),
        ("KCOORD_REDIS_URL", "http://redis.example", "redis://"),
        ("KCOORD_REDIS_URL", "redis://", "names no host"),
        ("KCOORD_REDIS_URL", "redis:///0", "names no host"),
        ("KCOORD_REDIS_URL", "redis://host:port/0", "cannot be parsed"),
        ("KCOORD_REDIS_URL", "redis://host:70000/0", "cannot be parsed"),
        ("KCOORD_REDIS_URL", "redis://[::1", "cannot be parsed"),
        ("KCOORD_REDIS_URL", "redis://host/abc", "the number of a database"),
        ("KCOORD_STALL_SECONDS", "-1", "0.5, or 0"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_a_remedy(name: str, value: str, remedy: str) -> None:
    line = refusal({name: value})
    assert line.startswith(f"{name}=")
    assert remedy in line


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{SECRET}@host",
        f"redis://user:{SECRET}@host:port/0",
        f"redis://user:{SECRET}@:6379/0",
        f"redis://:{SECRET}@host:70000",
        f"redis://user:{SECRET}/{SECRET}@host:6379/0",
        f"redis://user:{SECRET}#{SECRET}@host:x/0",
        f"redis://user:{SECRET}?{SECRET}@host:x/0",
        f"redis://user:{SECRET}@{SECRET}@host:x/0",
        f"redis://user:{SECRET}@[::1",
        f"redis://user:{SECRET}\N{FULLWIDTH SOLIDUS}@host/0",
        f"redis://user:{SECRET}\n@host:x/0",
        f"user:{SECRET}@host:6379",
        f"://user:{SECRET}@host:6379",
        f"{SECRET}@host",
        f"redis://host:x/0?password={SECRET}",
        f"redis://host:x/0?db=0&PASSWORD={SECRET}",
        f"redis+sentinel://user:{SECRET}@host:x,host/service",
        f"redis+sentinel://user:{SECRET}@host,host:70000/service",
        f"redis+sentinel://user:{SECRET}@host,/service",
        f"redis+sentinel://user:{SECRET}@host",
        f"redis+sentinel://user:{SECRET}@host/service/db?sentinel_password={SECRET}",
        f"redis://user:{SECRET}@host,/0",
        f"redis://user:{SECRET}@host,host:70000",
        f"redis+cluster://user:{SECRET}@host",
        f"redis://user:{SECRET}",
        f"redis://:{SECRET}/0",
        f"user:{SECRET}",
        f"redis+sentinel://user:{SECRET}/service",
    ],
)
def test_a_refusal_never_shows_the_password(url: str) -> None:
    assert SECRET not in refusal({"KCOORD_REDIS_URL": url})
    assert SECRET not in refusal({}, redis_url=url)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{SECRET}@host:6379/0",
        f"rediss://:{SECRET}@host",
        f"redis://host/0?password={SECRET}",
        f"unix://user:{SECRET}@/run/redis.sock?db=1",
        f"unix:///run/redis.sock?db=1&password={SECRET}",
        f"redis+sentinel://user:{SECRET}@host:1,[::1],host/service/0?sentinel_password={SECRET}&sentinel_username={SECRET}",
        f"rediss+sentinel://:{SECRET}@host/service",
    ],
)
def test_what_is_shown_of_the_settings_has_no_password(url: str) -> None:
    settings = Settings.from_environ({"KCOORD_REDIS_URL": url})
    assert settings.redis_url == url
    assert SECRET not in str(settings.redacted())
    assert SECRET not in repr(settings)
    shown = settings.redacted()["redis_url"]
    assert "host" in shown or "/run/redis.sock" in shown, "enough is left to recognise the server"


@pytest.mark.parametrize(
    "url",
    [
        f"redis+sentinel://user:pw@host/service?sentinel_password=half@{SECRET}",
        f"redis://host/0?password=half@{SECRET}&db=1",
        f"redis://user:half@host/0?password=half@{SECRET}",
    ],
)
def test_a_password_in_the_query_is_not_shown_from_its_at_sign_on(url: str) -> None:
    shown = Settings.from_environ({"KCOORD_REDIS_URL": url}).redacted()["redis_url"]
    assert SECRET not in shown
    assert "half" not in shown


def test_a_limit_below_the_ttl_is_refused_with_both_names() -> None:
    line = refusal({"KCOORD_LEASE_LIMIT": "10", "KCOORD_LEASE_TTL": "15"})
    assert "KCOORD_LEASE_LIMIT=10" in line
    assert "KCOORD_LEASE_TTL=15" in line
    assert "raise the limit" in line


def test_a_bad_flag_is_named_as_the_flag() -> None:
    line = refusal({"KCOORD_LEASE_TTL": "15"}, lease_ttl="never")
    assert line.startswith("--lease-ttl='never'")


def test_every_setting_can_be_set_by_its_variable() -> None:
    values = {
        "store": "/s", "local_dir": "/l", "redis_url": "redis://h", "socket": "/x.sock", "namespace": "n", "job": "j",
        "lease_ttl": "1.5", "lease_limit": "2.5", "max_wait": "3", "failure_ttl": "4", "idle_timeout": "5",
        "agent_timeout": "6", "memory_entries": "7", "spawn": "0", "disable": "1",
        "profile": "p",
    }  # fmt: skip
    known = {n: v for n, v in values.items() if n in {f.name for f in FIELDS}}
    settings = Settings.from_environ({variable(n): v for n, v in known.items()})
    defaults = Settings.from_environ({})
    assert [n for n in known if getattr(settings, n) == getattr(defaults, n)] == []


def test_a_flag_wins_over_the_environment() -> None:
    environ = {"KCOORD_STORE": "/from/environment", "KCOORD_NAMESPACE": "environment"}
    settings = Settings.from_environ(environ, store="/from/flag", namespace=None)
    assert settings.store == Path("/from/flag")
    assert settings.namespace == "environment"


def test_an_empty_variable_is_an_unset_one() -> None:
    assert Settings.from_environ(
        {"KCOORD_STORE": "", "KCOORD_LEASE_TTL": "", "KCOORD_PROFILE": ""}
    ) == Settings.from_environ({})


def test_paths_are_absolute_and_the_home_directory_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    settings = Settings.from_environ({"KCOORD_STORE": "~/store", "KCOORD_LOCAL_DIR": "here"})
    assert settings.store == Path("/home/somebody/store")
    assert settings.local_dir == Path.cwd() / "here"


def test_two_sets_of_settings_share_an_agent_only_if_it_would_be_the_same_agent() -> None:
    base = {"KCOORD_STORE": "/s", "KCOORD_LOCAL_DIR": "/l", "KCOORD_REDIS_URL": "redis://h", "KCOORD_NAMESPACE": "n"}
    variants = [
        base,
        {**base, "KCOORD_STORE": "/other"},
        {**base, "KCOORD_STORE": ""},
        {**base, "KCOORD_LOCAL_DIR": "/other"},
        {**base, "KCOORD_REDIS_URL": "redis://other"},
        {**base, "KCOORD_REDIS_URL": ""},
        {**base, "KCOORD_NAMESPACE": "other"},
        {**base, "KCOORD_SIGNING_KEY": "main:aa"},
        {**base, "KCOORD_SIGNING_KEY": "other:aa"},
        {**base, "KCOORD_SIGNING_KEY": "main:aa", "KCOORD_TRUST": "off"},
        {**base, "KCOORD_SIGNING_KEY_FILE": "/keys"},
        {**base, "KCOORD_TRUST": "require"},
    ]
    prints = [Settings.from_environ(v).fingerprint for v in variants]
    assert len(set(prints)) == len(variants)
    assert all(len(p) == 8 for p in prints)
    assert Settings.from_environ({**base, "KCOORD_MAX_WAIT": "9"}).fingerprint == prints[0]
    assert Settings.from_environ(dict(reversed(base.items()))).fingerprint == prints[0]


@pytest.mark.parametrize("length", [10, 60, 90, 150, 400])
def test_the_sockets_path_is_short_enough_to_bind(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "t" * length)
    for environ in ({}, {"KCOORD_LOCAL_DIR": "/data/" + "d" * length}, {"KCOORD_LOCAL_DIR": "/data/" + "ü" * length}):
        path = Settings.from_environ(environ).socket_path
        assert len(bytes(path)) <= 100  # sockaddr_un holds 108, and a lock file lies beside it
        assert Settings.from_environ(environ).fingerprint in path.name


def test_no_temporary_directory_is_looked_for_where_none_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks by writing a file into each: one may be on a file system that hangs."""

    def looks() -> str:
        raise AssertionError("it was looked for")

    monkeypatch.setattr(tempfile, "gettempdir", looks)
    assert Settings.from_environ({"KCOORD_LOCAL_DIR": "/l"}).socket_path.parent == Path("/l")


def test_settings_can_be_read_while_no_disk_takes_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", full)
    monkeypatch.setenv("TMPDIR", "/scratch")
    assert Settings.from_environ({}).local_dir.parent == Path("/scratch")
    monkeypatch.delenv("TMPDIR")
    assert Settings.from_environ({}).local_dir.parent == Path("/tmp")


def test_a_setting_that_does_not_exist_is_an_error_and_not_ignored() -> None:
    with pytest.raises(SettingsError, match="no setting 'stor'"):
        Settings.from_environ({}, stor="/shared")


def test_the_url_of_sentinels_says_who_they_are_and_what_they_watch() -> None:
    url = "rediss+sentinel://user:p%2Fw@one,[::1]:7,two:8/my-service/2?ssl_ca_certs=/ca.pem&sentinel_password=s%26s"
    found = Sentinels.of(url)
    assert found is not None
    assert found.addresses == (("one", 26379), ("::1", 7), ("two", 8))
    assert (found.service, found.username, found.password) == ("my-service", None, "s&s")
    assert found.options == "rediss://user:p%2Fw@master/2?ssl_ca_certs=%2Fca.pem"
    assert Sentinels.of("redis://host:6379/0") is None


def test_the_url_of_a_redis_cluster_may_name_several_nodes() -> None:
    url = "rediss://user:p%2Fw@one,[::1]:7,two:8/0?ssl_ca_certs=/ca.pem"
    assert Settings.from_environ({"KCOORD_REDIS_URL": url}).redis_url == url
    found = Nodes.of(url)
    assert found.addresses == (("one", 6379), ("::1", 7), ("two", 8))
    assert found.first == "rediss://user:p%2Fw@one/0?ssl_ca_certs=/ca.pem"
    assert Nodes.of("unix:///run/redis.sock?db=1") == Nodes((), "unix:///run/redis.sock?db=1")


def test_a_store_in_a_flag_may_be_relative_to_the_one_who_types_it() -> None:
    assert Settings.from_environ({}, store="store").store == Path("store").absolute()


def test_each_variable_that_is_no_setting_is_named_once_with_the_nearest_one() -> None:
    environ = {
        "KCOORD_STOER": "/store",
        "KCOORD_REDISURL": "redis://:secret@h",
        "KCOORD_XYZ": "1",
        "KCOORD_STORE": "/s",
        "X": "1",
    }
    lines = unknown_variables(environ)
    assert lines == [
        "there is no setting KCOORD_REDISURL: is KCOORD_REDIS_URL meant?",
        "there is no setting KCOORD_STOER: is KCOORD_STORE meant?",
        "there is no setting KCOORD_XYZ: 'kcoord doctor --json' has their names",
    ]
    assert unknown_variables(environ) == [], "nor by a child, which has this environment"
    assert unknown_variables({"KCOORD_STOER": "/store", "KCOORD_DISABLE": "1"}) == []
    (line,) = unknown_variables({"KCOORD_\n": ""})
    assert line.isprintable()
    settings = {variable(spec.name): "" for spec in FIELDS}
    assert unknown_variables(settings) == []
    assert settings == {variable(spec.name): "" for spec in FIELDS}


def test_where_signatures_are_required_the_local_directory_is_one_of_its_policy_and_keys() -> None:
    def tier(**flags: str) -> Path:
        return Settings.from_environ({"KCOORD_LOCAL_DIR": "/l"}, **flags).local_dir

    assert tier() == tier(signing_key="main:aa", trust="off") == Path("/l")
    required = [
        tier(signing_key="main:aa"),
        tier(signing_key="other:aa"),
        tier(signing_key_file="/keys"),
        tier(trust="require"),
    ]
    assert {place.parent for place in required} == {Path("/l")}
    assert len(set(required)) == 4
    assert tier(trust_keys="main", trust="require") == required[0], "a launched rank's, which has no key"
    assert tier(signing_key="main:aa", local_dir=str(required[0])) == required[0], "a child's"
    assert Settings.from_environ(
        {"KCOORD_LOCAL_DIR": "/l", "KCOORD_TRUST": "require"}
    ).shared_with_ranks.local_dir == Path("/l")


def test_sockets_have_a_directory_where_no_temporary_directory_lets_libraries_be_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(mounts, "flags_of", lambda directory: os.ST_NOEXEC)
    assert default_dir.runtime_directory() == tmp_path / f"kcoord-{os.getuid()}"
    assert (tmp_path / f"kcoord-{os.getuid()}").stat().st_mode & 0o777 == 0o700
