"""Every setting of kcoord, read once from the environment into one frozen object.

A setting is an environment variable ``KCOORD_<NAME>``; a command line flag of the same name wins over it.
`FIELDS` is the single table that the parser, ``kcoord doctor`` and the documentation are made from.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kcoord.errors import SettingsError
from kcoord.redis_url import parse_redis_url, read_redis_url, without_password
from kcoord.secret_files import is_left_out
from kcoord.units import parse_bytes, parse_span

PROTOCOL_VERSION = 2
_LONGEST_SOCKET_PATH = 100  # sockaddr_un holds 108 bytes; leave room for a lock file's suffix
_DEFAULT_NAMESPACE = "default"
SECRETS = ("redis_url", "redis_url_file", "signing_key", "signing_key_file")
"""The agent's alone: launchers keep them from the ranks."""
SECRET_FILES = {"redis_url_file": "redis_url", "signing_key_file": "signing_key"}
"""Secrets in files, and the settings that say the same without one."""
ALTERNATIVES = SECRET_FILES | {inline: file for file, inline in SECRET_FILES.items()}
"""Of such a pair, the one to each."""
LONGEST_JOB = 200  # characters of a job's name


def _path(value: str) -> Path:
    try:
        return Path(value).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # "~nobody/…"; or the working directory is gone
        raise ValueError(f"{error}: write the whole path") from None


def _socket(value: str) -> Path:
    path = _path(value)
    if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
        raise ValueError(f"it is longer than {_LONGEST_SOCKET_PATH} bytes, which a socket's path may be: shorten it")
    return path


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 10 * 365 * 86400:
        raise ValueError("it must be a positive number of seconds, such as 15 or 0.5")
    return seconds


def _seconds_or_never(value: str) -> float:
    return 0.0 if value.strip() in ("0", "0.0") else _seconds(value)


def _factor(value: str) -> float:
    try:
        factor = float(value)
    except ValueError:
        factor = -1.0
    if factor != 0 and not 1 <= factor < 1e6:
        raise ValueError("it must be a number of at least 1, such as 4, or 0")
    return factor


def _count(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError("it must be a whole number of at least 1")
    return int(value)


def _whole(value: str) -> int:
    if not value.isdecimal():
        raise ValueError("it must be a whole number, or 0")
    return int(value)


def _days(value: str) -> float:
    """Seconds. What an agent's ranks use is noted once a day: before two have passed, nobody knows what is unused."""
    try:
        seconds = float(value)  # as settings are handed on to an agent
    except ValueError:
        seconds = parse_span(value)
    if not 2 * 86400.0 <= seconds < 1e9:
        raise ValueError("it must be a time such as 30d, at least 2d: a use may be known a day late")
    return seconds


def _switch(value: str) -> bool:
    if value.lower() in ("1", "true", "yes", "on"):
        return True
    if value.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("it must be 1 or 0")


def _namespace(value: str) -> str:
    if value.startswith("."):
        raise ValueError("it must not begin with '.'")
    if not value or len(value) > 64 or not all(c.isalnum() or c in "-_." for c in value):
        raise ValueError("it must be 1 to 64 letters, digits, '-', '_' or '.'")
    return value


def _job(value: str) -> str:
    if len(value) > LONGEST_JOB or not value.isprintable():
        raise ValueError(f"it must be at most {LONGEST_JOB} characters, all of which print")
    return value


def _listening(value: str) -> str:
    """``host:port``, of a port alone this node's own address. Raises ValueError."""
    host, colon, port = value.strip().rpartition(":")
    host = host if colon else "127.0.0.1"
    if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise ValueError("it must be a port, as 9464, or host:port, as 0.0.0.0:9464 for all of this node's addresses")
    return f"{host}:{int(port)}"


def _log_format(value: str) -> str:
    if value.lower() not in ("text", "json"):
        raise ValueError("it must be text or json")
    return value.lower()


def profile_name(value: str) -> str:
    """`value`, if a profile may have this name, which is a directory's name too. Raises ValueError."""
    return _namespace(value)


def is_profile_name(value: str) -> bool:
    try:
        return bool(profile_name(value))
    except ValueError:
        return False


TRUST = ("require", "warn", "off")


def _trust(value: str) -> str:
    if value not in TRUST:
        raise ValueError("it must be require, warn or off")
    return value


def _secret(value: str) -> str:
    """Any: `kcoord.artifacts.signing` reads it, in the agent alone."""
    return value


def default_local_dir() -> Path:
    """``$TMPDIR/kcoord-<uid>``: local disk, where a home directory is often NFS."""
    try:
        directory = tempfile.gettempdir()  # it writes a file, to find out where that can be done
    except FileNotFoundError:  # nowhere, just now: whoever needs the directory says why not
        directory = os.environ.get("TMPDIR") or "/tmp"
    return Path(directory).absolute() / f"kcoord-{os.getuid()}"


def _setting(default: Any, parse: Callable[[str], Any], unit: str, doc: str, **kw: Any) -> Any:
    metadata = {"parse": parse, "unit": unit, "doc": doc}
    if callable(default):
        return field(default_factory=default, metadata=metadata, **kw)
    return field(default=default, metadata=metadata, **kw)


@dataclass(frozen=True)
class Settings:
    """All settings, parsed and checked. Build it with `Settings.from_environ`."""

    store: Path | None = _setting(
        None, _path, "directory", "Shared directory (NFS, Lustre, any POSIX directory) for artifacts. "
        "Unset: artifacts stay on this node.")  # fmt: skip
    local_dir: Path = _setting(
        default_local_dir, _path, "directory", "The node's own copies, on local disk. "
        "Default: kcoord-UID in the temporary directory.")  # fmt: skip
    redis_url: str | None = _setting(
        None, parse_redis_url, "URL", "Redis that elects one compiler across nodes; credentials, rediss:// and "
        "redis+sentinel:// included (a flag shows in the process list: prefer the variable). "
        "Unset: lease files in the store do, or each node elects its own.", repr=False)  # fmt: skip
    redis_url_file: Path | None = _setting(
        None, _path, "file", "A file that holds that URL, for the agent alone: a mounted Secret, or a file that only its owner "
        "may read. It wins over KCOORD_REDIS_URL.")  # fmt: skip
    socket: Path | None = _setting(
        None, _socket, "file", "The agent's Unix socket. Default: made from the other settings, in the "
        "local directory.")  # fmt: skip
    namespace: str = _setting(
        _DEFAULT_NAMESPACE, _namespace, "name", "Keeps teams that share one Redis and one store apart: another than "
        "`default` has its own store, in namespaces/NAME below KCOORD_STORE.")  # fmt: skip
    trust: str | None = _setting(
        None, _trust, "policy", "What to do with artifacts and profiles in the store that no key of ours has signed: require "
        "(compile instead), warn (say so once) or off. Default: require with a signing key, off without.")  # fmt: skip
    signing_key_file: Path | None = _setting(
        None, _path, "file", "Keys that sign and verify what is in the store, for the agent alone: lines of a key id and a "
        "secret, as hex or base64; the first signs, all verify. A mounted Secret, or a file that only its owner may "
        "read.")  # fmt: skip
    signing_key: str | None = _setting(
        None, _secret, "ID:SECRET", "One such key, where a file is inconvenient. KCOORD_SIGNING_KEY_FILE wins.",
        repr=False)  # fmt: skip
    lease_ttl: float = _setting(
        15.0, _seconds, "seconds", "A lease that is not renewed for this long is free again. "
        "It is renewed every third of it.")  # fmt: skip
    lease_limit: float = _setting(900.0, _seconds, "seconds", "One compile may hold its lease for at most this long.")
    stall: float = _setting(
        60.0, _seconds_or_never, "seconds", "A compile whose processes have not used the CPU for this long is led by another "
        "rank. 0: never.")  # fmt: skip
    hedge: float = _setting(
        4.0, _factor, "factor", "When a compile takes this many times what its kernel took before, one more rank is let go "
        "ahead. 0: never.")  # fmt: skip
    hedge_after: float = _setting(10.0, _seconds, "seconds", "No compile is taken for slow before this long.")
    max_wait: float = _setting(
        300.0, _seconds, "seconds", "A rank that waited this long for another rank's compile compiles "
        "for itself. Keep it below the process group's time-out.")  # fmt: skip
    failure_ttl: float = _setting(
        30.0, _seconds, "seconds", "For this long after a failed compile, ranks that ask for the key compile "
        "for themselves at once (of `compile_once`: raise what it raised).")  # fmt: skip
    idle_timeout: float = _setting(
        600.0,
        _seconds,
        "seconds",
        "An agent that was started by a rank ends after this long without one.",
    )
    agent_timeout: float = _setting(
        5.0, _seconds, "seconds", "A rank gives up on an agent that is silent for this long."
    )
    memory_entries: int = _setting(4096, _count, "count", "Loaded artifacts that a rank keeps in memory.")
    spawn: bool = _setting(True, _switch, "0 or 1", "Whether a rank that finds no agent starts one.")
    job: str | None = _setting(
        None, _job, "name", "Names the job in statistics; equal on all its nodes. "
        "Default: the launcher's job id.")  # fmt: skip
    profile: str | None = _setting(
        None, profile_name, "name", "Compiles are recorded under this name, and `kcoord-torchrun` compiles what was "
        "recorded before the job starts.")  # fmt: skip
    ahead: int = _setting(
        8, _whole, "count", "Processes of a node, at most, that compile upcoming keys of the profile while ranks wait: no "
        "more than there are idle cores, and 4 GiB of free memory for each. 0: none.")  # fmt: skip
    metrics: str | None = _setting(
        None, _listening, "host:port", "Where the agent serves its metrics to Prometheus, at /metrics. A port alone: to this "
        "host only; 0.0.0.0:PORT in a pod. Unset: nowhere.")  # fmt: skip
    log_format: str = _setting(
        "text", _log_format, "text or json", "How the agent logs: lines for people, or one JSON object a line.")  # fmt: skip
    store_max_size: int | None = _setting(
        None, parse_bytes, "size", "What the artifacts in the store may take, such as 50GiB: now and then an agent "
        "removes what was used longest ago. Unset: no bound.")  # fmt: skip
    store_max_files: int | None = _setting(
        None, _count, "count", "How many files and directories the artifacts in the store may be (each is three), in the same "
        "way. Unset: no bound.")  # fmt: skip
    store_unused_for: float | None = _setting(
        None, _days, "time", "An agent removes from the store what no job has used for so long, such as 30d; at least 2d. "
        "Unset: it stays.")  # fmt: skip
    local_max_size: int | None = _setting(
        None, parse_bytes, "size", "The same of this node's own copies; what was used within a day stays. "
        "Unset: no bound.")  # fmt: skip
    disable: bool = _setting(False, _switch, "0 or 1", "1: everything off, everything as without kcoord.")
    optional: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    """No setting: of `SECRET_FILES`, those that a variable named, and no flag. A mounted Kubernetes Secret may lack them."""

    @classmethod
    def from_environ(
        cls, environ: Mapping[str, str] | None = None, flag_prefix: str = "--", /, **flags: str | None
    ) -> Settings:
        """Read ``KCOORD_*`` from `environ` (default: `os.environ`); a flag that is not None wins.

        Of a secret and the file of it, a flag wins over a variable, and the file otherwise. No file is looked at: it may lie on
        a file system that hangs.

        Raises `SettingsError`, one line that names the setting and the remedy.
        """
        unknown = sorted(flags.keys() - {spec.name for spec in FIELDS})
        if unknown:
            raise SettingsError(f"there is no setting {unknown[0]!r}: see 'kcoord doctor --json' for their names")
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        optional = set()
        for spec in FIELDS:
            variable = f"KCOORD_{spec.name.upper()}"
            text = flags.get(spec.name)
            source = flag_prefix + spec.name.replace("_", "-")
            if text is None and flags.get(ALTERNATIVES.get(spec.name, "")) is None:
                text, source = environ.get(variable), variable
            if text is None or (text == "" and spec.metadata["parse"] is not _namespace):
                continue
            try:
                values[spec.name] = spec.metadata["parse"](text)
            except (ValueError, OverflowError) as error:
                shown = without_password(text) if spec.name == "redis_url" else repr(text)
                raise SettingsError(f"{source}={shown}: {error}") from None
            if source == variable and spec.name in SECRET_FILES:
                optional.add(spec.name)
        settings = cls(**values, optional=frozenset(optional))
        if settings.lease_limit < settings.lease_ttl:
            raise SettingsError(
                f"KCOORD_LEASE_LIMIT={settings.lease_limit:g} is below KCOORD_LEASE_TTL={settings.lease_ttl:g}: "
                "raise the limit or lower the TTL"
            )
        return settings

    def as_mounted(self) -> Settings:
        """The same, of who reads secrets: what a variable names and a mounted Secret lacks (`is_left_out`) is unset.

        Blocks for as long as the file system does.
        """
        named = {name: path for name in self.optional if (path := getattr(self, name)) is not None}
        left_out: dict[str, Any] = {name: None for name, path in named.items() if is_left_out(path)}
        # the socket's name stays what it is for those who do not look
        return replace(self, socket=self.socket_path, **left_out) if left_out else self

    @property
    def store_root(self) -> Path | None:
        """The root of this namespace's store: `store` itself for the default one, a directory below it for another."""
        if self.store is None or self.namespace == _DEFAULT_NAMESPACE:
            return self.store
        return self.store / "namespaces" / self.namespace

    @property
    def fingerprint(self) -> str:
        """Eight hex digits that differ when two processes must not share an agent.

        A file of the URL counts by its name: ranks need not be able to read it, and a new password makes no second agent.
        """
        parts = (PROTOCOL_VERSION, self.store, self.local_dir, self.redis_url_file or self.redis_url, self.namespace)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]

    @property
    def socket_path(self) -> Path:
        """Where the agent listens: `socket`, or a name made from the settings that make an agent."""
        if self.socket is not None:
            return self.socket
        path = self.local_dir / f"agent-{self.fingerprint}.sock"
        if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
            path = default_local_dir() / path.name  # which may have to be found out: not without need
        if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
            path = Path("/tmp", f"kcoord-{os.getuid()}", path.name)  # TMPDIR is too long as well
        return path

    def redis_address(self) -> str | None:
        """The URL of Redis, read from its file if there is one. Raises `SettingsError`. For the agent alone: it is a secret.

        Blocks for as long as the file system does.
        """
        mounted = self.as_mounted()
        return mounted.redis_url if mounted.redis_url_file is None else read_redis_url(mounted.redis_url_file)

    def redacted(self) -> dict[str, Any]:
        """All values as JSON-able data, without the Redis password and the signing key's secret."""
        shown = {f.name: getattr(self, f.name) for f in FIELDS}
        key_id, colon, _ = (self.signing_key or "").partition(":")
        shown["signing_key"] = f"{key_id}:***" if colon else None
        shown["redis_url"] = without_password(self.redis_url) if self.redis_url else None
        return {name: str(v) if isinstance(v, Path) else v for name, v in shown.items()}


FIELDS = tuple(spec for spec in fields(Settings) if spec.metadata)


def variable(name: str) -> str:
    """The environment variable of a setting's field name."""
    return f"KCOORD_{name.upper()}"
