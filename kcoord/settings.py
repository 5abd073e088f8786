"""All settings of kcoord, read once from the environment into one frozen object.

A setting is an environment variable ``KCOORD_<NAME>``; a command line flag of the same name wins over it.
`FIELDS` is the one table for the parser, ``kcoord doctor`` and the documentation.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kcoord import setting_values as values
from kcoord.default_dir import cache_directory, local_directory, runtime_directory, usual_runtime_dir
from kcoord.errors import SettingsError
from kcoord.redis_url import parse_redis_url, read_redis_url, without_password
from kcoord.secret_files import is_left_out
from kcoord.units import parse_bytes

PROTOCOL_VERSION = 5
profile_name = values.name
"""Returns a name that a profile may have. Raises ValueError for another."""
_DEFAULT_NAMESPACE = "default"
SECRETS = ("redis_url", "redis_url_file", "signing_key", "signing_key_file")
"""For the agent alone: launchers keep them from the ranks."""
SECRET_FILES = {"redis_url_file": "redis_url", "signing_key_file": "signing_key"}
"""Secrets in files, and the settings that hold the same secret inline."""
ALTERNATIVES = SECRET_FILES | {inline: file for file, inline in SECRET_FILES.items()}
"""The other one of such a pair."""
LONGEST_JOB = values.LONGEST_JOB
PATIENCE = 4
"""Times `max_wait` that a compile on this node is waited for while it uses the CPU."""
_REQUIRED = "require-"  # the beginning of a local directory's name
NO_PROFILE = "off"
"""As a profile's name: none."""


def is_profile_name(value: str) -> bool:
    try:
        return bool(profile_name(value))
    except ValueError:
        return False


def _setting(default: Any, parse: Callable[[str], Any], unit: str, doc: str, **kw: Any) -> Any:
    metadata = {"parse": parse, "unit": unit, "doc": doc}
    if callable(default):
        return field(default_factory=default, metadata=metadata, **kw)
    return field(default=default, metadata=metadata, **kw)


@dataclass(frozen=True)
class Settings:
    """All settings, parsed and checked. `Settings.from_environ` makes it."""

    store: Path | None = _setting(
        None, values.path, "directory", "Shared directory (NFS, Lustre, any POSIX directory) for artifacts. Unset: "
        "they stay on this node.")  # fmt: skip
    store_create: bool = _setting(
        False, values.switch, "0 or 1", "1: a process that finds no store in KCOORD_STORE makes one, as `kcoord store "
        "init` does.")  # fmt: skip
    local_dir: Path = _setting(
        usual_runtime_dir, values.path, "directory", "The node's own copies, on local disk, for this user alone. Default: "
        "~/.cache/kcoord if that is local and takes files; else kcoord-UID in the temporary directory.")  # fmt: skip
    redis_url: str | None = _setting(
        None, parse_redis_url, "URL", "Redis that elects one compiler across nodes, with its credentials: "
        "redis://, rediss://, redis+sentinel://, or nodes of a Redis Cluster (redis://host:port,host:port). A flag shows in the "
        "process list. Unset: lease files in the store elect it.", repr=False)  # fmt: skip
    redis_url_file: Path | None = _setting(
        None, values.path, "file", "A file that holds this URL, for the agent alone: a mounted Secret, or a file that "
        "only its owner may read. It wins.")  # fmt: skip
    socket: Path | None = _setting(
        None, values.socket, "file", "The agent's Unix socket. Default: named by the other settings, in the "
        "local or the temporary directory.")  # fmt: skip
    namespace: str = _setting(
        _DEFAULT_NAMESPACE, values.name, "name", "Separates teams that share one Redis and one store. No security "
        "boundary.")  # fmt: skip
    trust: str | None = _setting(
        None, values.one_of(*values.TRUST), "policy", "What to do with store content that is not signed by one of our keys: "
        "require (compile instead) or off (use it). Default: require with a signing key, off without.")  # fmt: skip
    signing_key_file: Path | None = _setting(
        None, values.path, "file", "Keys that sign and verify the store's content, for the agent alone; `kcoord keys` "
        "makes them. A mounted Secret, or a file that only its owner may read.")  # fmt: skip
    signing_key: str | None = _setting(
        None, str, "ID:KEY", "One such key, where a file is inconvenient. KCOORD_SIGNING_KEY_FILE wins.",
        repr=False)  # fmt: skip
    trust_keys: str | None = _setting(
        None, str, "name", "Set by launchers: identifies the signing keys a rank expects its agent to hold.")  # fmt: skip
    lease_ttl: float = _setting(
        15.0, values.seconds, "seconds", "A lease expires when it is not renewed for this long.")  # fmt: skip
    lease_limit: float = _setting(
        900.0, values.seconds, "seconds", "One compile may hold its lease for at most this long.")  # fmt: skip
    stall_seconds: float = _setting(
        60.0, values.seconds_or_never, "seconds", "Another rank leads a compile whose processes have not used the CPU "
        "for this long. 0: never.")  # fmt: skip
    hedge: float = _setting(
        4.0, values.factor, "factor", "When a compile takes this many times as long as the same one took before, "
        "one more rank of each node that waits compiles it. 0: never.")  # fmt: skip
    hedge_after: float = _setting(10.0, values.seconds, "seconds", "No compile counts as slow before this long.")
    max_wait: float = _setting(
        300.0, values.seconds, "seconds", "Ranks wait this long for a compile on another node, and four times as long for "
        "one on their own node that uses the CPU; then one rank of the node compiles, too. Keep it below the process group's "
        "timeout.")  # fmt: skip
    failure_ttl: float = _setting(
        30.0, values.seconds, "seconds", "For this long after a failed compile, ranks compile the key for themselves "
        "at once.")  # fmt: skip
    idle_timeout: float = _setting(
        600.0, values.seconds, "seconds", "An agent that a rank started ends after this long without ranks.")  # fmt: skip
    agent_timeout: float = _setting(
        5.0, values.seconds, "seconds", "A rank gives up on an agent that does not answer for this long.")  # fmt: skip
    memory_entries: int = _setting(4096, values.count, "count", "Loaded artifacts that a rank keeps in memory.")
    spawn: bool = _setting(True, values.switch, "0 or 1", "1: a rank that finds no agent starts one.")
    job: str | None = _setting(
        None, values.job, "name", "The job's name in figures and time lines; the same on all its nodes. Default: the launcher's "
        "job id.")  # fmt: skip
    profile: str | None = _setting(
        None, values.name, "name", "Compiles are recorded under this name, and compiled ahead in later jobs. Default: a name "
        "made from what the job runs. off: nothing is recorded.")  # fmt: skip
    toolchain: str | None = _setting(
        None, values.name, "name", "A toolchain of the store, by digest or name (`kcoord toolchain ls`). On a node "
        "without compilers, launchers put stubs of it last on PATH, and what the store has of them loads.")  # fmt: skip
    pool_workers: int = _setting(
        64, values.count_or_none, "count", "The most workers of the node's pool, which compiles keys before ranks ask for "
        "them. 0: none.")  # fmt: skip
    move: bool = _setting(
        True, values.switch, "0 or 1", "1: ranks share the graphs of torch.compile though each has a GPU of another index. 0: "
        "ranks with GPUs of one index share them.")  # fmt: skip
    share_workers: bool = _setting(
        True, values.switch, "0 or 1", "1: ranks of a node share one pool of torch's compile workers. 0: each rank has its "
        "own.")  # fmt: skip
    metrics: str | None = _setting(
        None, values.address, "host:port", "The address at which the agent serves /metrics to Prometheus. A port "
        "alone: to this host only; 0.0.0.0:PORT in a pod.")  # fmt: skip
    page: str | None = _setting(
        None, values.address, "host:port", "The address at which the agent serves `kcoord status` as a page for "
        "browsers. A port alone: to this host only.")  # fmt: skip
    log_format: str = _setting(
        "text", values.one_of("text", "json", any_case=True), "text or json", "The agent's log: lines for people, or "
        "one JSON object a line.")  # fmt: skip
    store_max_size: int | None = _setting(
        None, parse_bytes, "size", "The most space that artifacts in the store take, such as 50GiB: agents remove the "
        "least recently used.")  # fmt: skip
    store_max_files: int | None = _setting(
        None, values.count, "count", "The same for the number of files; an artifact in the store is one.")  # fmt: skip
    store_unused_for: float | None = _setting(
        None, values.days, "time", "Agents remove artifacts from the store that no job has used for this long, such "
        "as 30d; at least 2d.")  # fmt: skip
    local_max_size: int | None = _setting(
        None, parse_bytes, "size", "The most space for this node's own copies; those used within 26 hours stay. Default: "
        "none; in the user's cache directory 10GiB, or 5 % of the file system if that is less.")  # fmt: skip
    disable: bool = _setting(False, values.switch, "0 or 1", "1: everything as without kcoord.")
    optional: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    """No setting: those of `SECRET_FILES` that a variable named, and no flag. A mounted Kubernetes Secret may lack them."""

    @classmethod
    def from_environ(
        cls, environ: Mapping[str, str] | None = None, flag_prefix: str = "--", /, **flags: str | None
    ) -> Settings:
        """Read ``KCOORD_*`` from `environ` (default: `os.environ`); a flag that is not None wins.

        Without `environ`, a default local directory is chosen and created. It is named in `os.environ`, for this process's
        children.

        Between a secret and its file a flag wins over a variable, and otherwise the file wins. No file is read: its file system
        may hang.

        Raises `SettingsError`, one line that names the setting and the remedy.
        """
        unknown = sorted(flags.keys() - {spec.name for spec in FIELDS})
        if unknown:
            raise SettingsError(f"there is no setting {unknown[0]!r}: see 'kcoord doctor --json' for their names")
        here, environ = environ is None, os.environ if environ is None else environ
        parsed: dict[str, Any] = {}
        optional = set()
        for spec in FIELDS:
            text, source = flags.get(spec.name), flag_prefix + spec.name.replace("_", "-")
            if text is None and flags.get(ALTERNATIVES.get(spec.name, "")) is None:
                source = variable(spec.name)
                text = environ.get(source)
            if text is None or (text == "" and spec.name != "namespace"):
                continue
            try:
                if text.startswith("--") and source != variable(spec.name):
                    raise ValueError("its value is missing")
                if spec.name == "store" and source == variable("store"):
                    values.same_everywhere(text)
                parsed[spec.name] = spec.metadata["parse"](text)
            except (ValueError, OverflowError) as error:
                shown = without_password(text) if spec.name == "redis_url" else f"{text!r:.300}"
                raise SettingsError(f"{source}={shown}: {error}") from None
            if source == variable(spec.name) and spec.name in SECRET_FILES:
                optional.add(spec.name)
        if here and "local_dir" not in parsed and not parsed.get("disable"):
            parsed["local_dir"] = local_directory()
            os.environ[variable("local_dir")] = str(parsed["local_dir"])
        settings = cls(**parsed, optional=frozenset(optional))
        if settings.lease_limit < settings.lease_ttl:
            raise SettingsError(
                f"KCOORD_LEASE_LIMIT={settings.lease_limit:g} is below KCOORD_LEASE_TTL={settings.lease_ttl:g}: "
                "raise the limit or lower the TTL"
            )
        return replace(settings, local_dir=settings._tier())

    @classmethod
    def of_job(cls, flag_prefix: str = "--", /, **flags: str | None) -> Settings:
        """`from_environ` for what compiles: with KCOORD_DISABLE=1 another setting that is wrong ends no job."""
        try:
            return cls.from_environ(None, flag_prefix, **flags)
        except SettingsError:
            if os.environ.get(variable("disable"), "").lower() not in values.ON:
                raise
            return cls(disable=True)

    def _tier(self) -> Path:
        """The local directory of this policy: where signatures are required one of its own, below the one that is named.

        So nothing is loaded there that was fetched, or copied, under less trust or other keys. The name of a directory that an
        earlier process has chosen so stays.
        """
        if self.policy != "require":
            return self.local_dir
        name = f"{_REQUIRED}{hashlib.sha256(str(self.key_name).encode()).hexdigest()[:8]}"
        return self.local_dir if self.local_dir.name == name else self.local_dir / name

    @property
    def shared_with_ranks(self) -> Settings:
        """A copy with the local directory as it is named: for a sidecar, whose ranks know neither its policy nor its keys."""
        named = self.local_dir.parent if self.local_dir.name.startswith(_REQUIRED) else self.local_dir
        return replace(self, local_dir=named)

    def as_mounted(self) -> Settings:
        """A copy for a process that reads secrets, without the files that a mounted Secret lacks (`is_left_out`).

        Blocks for as long as the file system does.
        """
        named = {name: path for name in self.optional if (path := getattr(self, name)) is not None}
        left_out: dict[str, Any] = {name: None for name, path in named.items() if is_left_out(path)}
        if not left_out:
            return self
        # socket and keys keep their names, which other processes make without looking at files
        mounted = replace(self, socket=self.socket_path, trust_keys=self.key_name, **left_out)
        return mounted if mounted.policy == self.policy else mounted.shared_with_ranks

    @property
    def store_root(self) -> Path | None:
        """The root of this namespace's store: `store` for the default namespace, else a directory below it."""
        if self.store is None or self.namespace == _DEFAULT_NAMESPACE:
            return self.store
        return self.store / "namespaces" / self.namespace

    @property
    def longest_wait(self) -> float:
        """Seconds after which every claim has been answered: one wait for the leader, and one for the rank that follows."""
        return 2 * PATIENCE * self.max_wait

    @property
    def recorded_as(self) -> str | None:
        """The name of the profile that is recorded and used, if there is one."""
        return None if self.profile == NO_PROFILE else self.profile

    @property
    def policy(self) -> str:
        """`trust`, or its default."""
        has_key = self.signing_key_file is not None or self.signing_key is not None
        return self.trust or ("require" if has_key else "off")

    @property
    def key_name(self) -> str | None:
        """The public name of the signing keys: their file's path, or the id of the one key. None: there are none.

        A file counts by its name, as that of the Redis URL: ranks need no right to read it, and it may be rotated.
        """
        if self.signing_key_file is not None:
            return str(self.signing_key_file)
        return self.trust_keys if self.signing_key is None else self.signing_key.strip().partition(":")[0]

    @property
    def fingerprint(self) -> str:
        """Eight hex digits that differ when two processes must not share an agent.

        The URL's file counts by its name: ranks need no right to read it, and a new password makes no second agent.
        """
        redis = self.redis_url_file or self.redis_url
        parts = (
            PROTOCOL_VERSION, self.store, self.local_dir, redis, self.namespace, self.trust, self.key_name,
        )  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]

    @property
    def socket_path(self) -> Path:
        """The path at which the agent listens: `socket`, or a name made from the settings that make an agent."""
        if self.socket is not None:
            return self.socket
        path = self.local_dir / f"agent-{self.fingerprint}.sock"
        # containers that share a home must not meet one agent: it knows its ranks by their pids
        if (
            cache_directory() in (self.local_dir, self.local_dir.parent)
            or len(os.fsencode(path)) > values.LONGEST_SOCKET_PATH
        ):
            path = runtime_directory() / path.name  # may write to the disk: only if needed
        if len(os.fsencode(path)) > values.LONGEST_SOCKET_PATH:
            path = Path("/tmp", usual_runtime_dir().name) / path.name  # TMPDIR is too long as well
        return path

    def redis_address(self) -> str | None:
        """The secret URL of Redis, read from its file if there is one. For the agent alone. Raises `SettingsError`.

        Blocks for as long as the file system does.
        """
        mounted = self.as_mounted()
        return mounted.redis_url if mounted.redis_url_file is None else read_redis_url(mounted.redis_url_file)

    @property
    def redis_setting(self) -> str:
        """The variable from which `redis_address` comes. Blocks as that does."""
        return variable("redis_url" if self.as_mounted().redis_url_file is None else "redis_url_file")

    def to_environ(self, *, without: Collection[str] = ()) -> dict[str, str]:
        """Environment variables with these values, for another process; a setting that is None has none."""
        values = {f.name: getattr(self, f.name) for f in FIELDS if f.name not in without}
        return {variable(n): str(int(v)) if isinstance(v, bool) else str(v) for n, v in values.items() if v is not None}

    def redacted(self) -> dict[str, Any]:
        """All values for JSON, without the Redis password and the signing key's secret."""
        shown = {f.name: getattr(self, f.name) for f in FIELDS}
        key_id, colon, _ = (self.signing_key or "").partition(":")
        shown["signing_key"] = f"{key_id}:***" if colon else None
        shown["redis_url"] = without_password(self.redis_url) if self.redis_url else None
        return {name: str(v) if isinstance(v, Path) else v for name, v in shown.items()}


FIELDS = tuple(spec for spec in fields(Settings) if spec.metadata)


def variable(name: str) -> str:
    """The environment variable of a setting's field name."""
    return f"KCOORD_{name.upper()}"


_PREFIX = variable("")
_NAMED = "_KCOORD_UNKNOWN_NAMED"  # in the environment once the lines were shown


def unknown_variables(environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """A line for each variable of `environ` that looks like a setting and is none, for this process and its children once."""
    known = sorted(variable(spec.name) for spec in FIELDS)
    unknown = sorted(name for name in environ if name.startswith(_PREFIX) and name not in known)
    if not unknown or _NAMED in environ or environ.get(variable("disable"), "") not in ("", "0"):
        return []
    import difflib  # seldom needed

    environ[_NAMED] = "1"
    lines = []
    for name in unknown:
        own = [each.removeprefix(_PREFIX) for each in known]  # what all have in common is no resemblance
        nearest = difflib.get_close_matches(name.removeprefix(_PREFIX), own, 1)
        hint = f"is {_PREFIX}{nearest[0]} meant?" if nearest else "'kcoord doctor --json' has their names"
        lines.append(f"there is no setting {name[:80] if name.isprintable() else ascii(name)[:80]}: {hint}")
    return lines
