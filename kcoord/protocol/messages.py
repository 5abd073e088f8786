"""The messages of the agent's socket: frozen dataclasses, parsed once, at the edge, and encoded by the same types.

A client sends requests, each with an ``id``, and gets one answer with that id; ``waiting`` frames before it are heartbeats. The
annotation of a field names its reader in `_READERS`. A field that is None is not sent, and one that is absent has its default.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from kcoord.errors import ProtocolError
from kcoord.keys.cache_key import CacheKey
from kcoord.protocol import fields

M = TypeVar("M", bound="Message")
Digest = str
Text = str
Log = str
Job = str
Directory = Path
Number = float
Count = int
Key = CacheKey

_READERS: dict[str, fields.Reader] = {
    "Digest": fields.digest,
    "Text": fields.text,
    "Log": fields.log,
    "Job": fields.job,
    "Directory": fields.directory,
    "Number": fields.number,
    "Count": fields.count,
    "Key": fields.key,
    "str": functools.partial(fields.field, kind=str),
    "bytes": functools.partial(fields.field, kind=bytes),
    "bool": functools.partial(fields.field, kind=bool),
    "int": functools.partial(fields.field, kind=int),
    "list[Any]": functools.partial(fields.field, kind=list),  # nobody has checked its items
    "dict[str, Any]": functools.partial(fields.field, kind=dict),
}


@dataclass(frozen=True)
class Message:
    """`op` names the type on the wire. Messages without fields are no dataclasses of their own, which take a while to import."""

    op: ClassVar[str]
    ops: ClassVar[dict[str, type[Any]]]

    def __init_subclass__(cls, op: str = "") -> None:
        if op:
            cls.op, cls.ops[op] = op, cls

    def to_wire(self, request: int) -> dict[str, Any]:
        """A frame's content, for the request with the id `request`."""
        values = {name: _plain(value) for name, value in vars(self).items() if value is not None}
        return {"op": self.op, "id": request, **values}

    @classmethod
    def from_wire(cls: type[M], message: Mapping[str, Any]) -> M:
        """Raises `ProtocolError`."""
        found = {}
        for name, (read, required) in _fields_of(cls).items():  # type: ignore[arg-type]
            if required or message.get(name) is not None:
                found[name] = read(message, name)
        return cls(**found)


@functools.cache
def _fields_of(kind: type[Message]) -> dict[str, tuple[fields.Reader, bool]]:
    """The reader of each field, and True if the field is required."""
    missing = dataclasses.MISSING
    return {
        field.name: (
            _READERS[str(field.type).removesuffix(" | None")],
            field.default is missing and field.default_factory is missing,
        )
        for field in dataclasses.fields(kind)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return value.to_wire() if isinstance(value, CacheKey) else value


class Request(Message):
    """A client's question. One about a key has a `digest`, or the whole `key`."""

    ops: ClassVar[dict[str, type[Request]]] = {}


class Answer(Message):
    """The agent's answer."""

    ops: ClassVar[dict[str, type[Answer]]] = {}


# Answers to a claim.


@dataclass(frozen=True)
class Ready(Answer, op="ready"):
    """The artifact is at the home that was asked for. `source`: ``store``, ``pack``, or ``wait`` for another's compile."""

    source: str


@dataclass(frozen=True)
class Lead(Answer, op="lead"):
    """Compile. `hedges`: somebody else compiles the key too, and is slow."""

    token: str
    hedges: bool = False


@dataclass(frozen=True)
class Failed(Answer, op="failed"):
    """Another rank's compile failed a moment ago. `log` is its compiler's."""

    log: str
    where: str


@dataclass(frozen=True)
class Alone(Answer, op="alone"):
    """Nobody coordinates this key: compile it without a lead."""

    why: str


class Busy(Answer, op="busy"):
    """Another rank compiles the key, here or on another node. Only for a claim that does not wait. `BUSY` is the one instance."""

    @classmethod
    def from_wire(cls: type[M], message: Mapping[str, Any]) -> M:
        return BUSY  # type: ignore[return-value]


BUSY: Final = Busy()
ClaimAnswer = Ready | Lead | Failed | Alone | Busy


# Other answers.


class Done(Answer, op="done"):
    """The request has been carried out. After `Publish`: the artifact is at its home."""


@dataclass(frozen=True)
class Refused(Answer, op="refused"):
    """The files that were handed in cannot be published."""

    why: str


@dataclass(frozen=True)
class Choice(Answer, op="choice"):
    """The choice that holds for a key. None: there is none, or nobody keeps it."""

    content: bytes | None = None


@dataclass(frozen=True)
class Measurements(Answer, op="measurements"):
    """`next` is the number of the configuration to measure. None: all are measured, and `timings` are in their order."""

    next: int | None = None
    timings: list[Any] = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class ProfileState(Answer, op="profile"):
    """`checked`: signatures are required, and the profile is to be read on this node. `late`: it is not there yet, ask again."""

    checked: bool
    late: bool


@dataclass(frozen=True)
class Granted(Answer, op="granted"):
    """`granted`: start the job's pool. `modules`: no profile of the job is known; other jobs have recipes of these."""

    granted: bool
    modules: list[Any] = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class Joined(Answer, op="joined"):
    """`workers` is the most that the pool may have; 0: there is another, or nothing to do. `modules`: of its recipes."""

    workers: int
    modules: list[Any]


@dataclass(frozen=True)
class Work(Answer, op="work"):
    """The next recipe of a pool's worker, or of a warm-up's caller, as `Recipe.to_wire` gives it.

    To a worker, None: ask again; `over`: there is nothing left to do. To a caller, None: there is nothing left for it; `waits`:
    others compile it, wait for them. `left` of the caller's keys are not settled; workers of the pool compiled `pooled` of them.
    """

    recipe: dict[str, Any] | None = None
    over: bool = False
    waits: bool = False
    left: int = 0
    pooled: int = 0


@dataclass(frozen=True)
class Left(Answer, op="left"):
    """`last`: no other launcher uses the agent. `last_of_job`: none of the same job does. `ends`: the agent's process, if it ends
    with this launcher; else 0.
    """

    last: bool
    last_of_job: bool
    ends: int


@dataclass(frozen=True)
class Facts(Answer, op="facts"):
    """The agent's status, or a job's counters: a document for people, whose entries are sent as fields."""

    facts: dict[str, Any]

    def to_wire(self, request: int) -> dict[str, Any]:
        return {**self.facts, "op": self.op, "id": request}

    @classmethod
    def from_wire(cls: type[M], message: Mapping[str, Any]) -> M:
        return cls({name: value for name, value in message.items() if name not in ("op", "id")})  # type: ignore[call-arg]


# Requests.


@dataclass(frozen=True)
class Claim(Request, op="claim"):
    """Ask for a key's artifact at `home`. `wait` is false: answer `Busy` rather than wait for another rank's compile.

    `recipe` is the digest of the key's recipe, if the job has a profile, which knows how long it takes to compile. `passing`:
    the rank will throw the directory of `home` away; what is compiled there is shared on this node, and not with other nodes or
    jobs.
    """

    digest: Digest
    backend: Text
    name: Text
    home: Directory
    wait: bool = True
    recipe: Digest | None = None
    passing: bool = False

    @property
    def label(self) -> str:
        """``backend:name``, for people and for what is learned of the kernel."""
        return f"{self.backend}:{self.name}"


@dataclass(frozen=True)
class Publish(Request, op="publish"):
    """Hand in the files in `staging`, compiled in `compile_seconds`. An empty `token`: this rank was granted no lead."""

    key: Key
    token: str
    staging: Directory
    home: Directory
    compile_seconds: Number
    device: Text


@dataclass(frozen=True)
class Fail(Request, op="fail"):
    """The leader's compile failed. `log` is its compiler's, of which the last `fields.LONGEST_LOG` characters travel."""

    digest: Digest
    token: str
    log: Log


@dataclass(frozen=True)
class GiveUp(Request, op="give_up"):
    """The leader does not compile after all; or, if it states `why`, it did, and cannot share its files."""

    digest: Digest
    token: str
    why: Text = ""


@dataclass(frozen=True)
class Lookup(Request, op="lookup"):
    """Ask for the choice of a key."""

    digest: Digest


@dataclass(frozen=True)
class Offer(Request, op="offer"):
    """Offer `content` as the choice of `key`. `seconds`: the time that choosing took."""

    key: Key
    content: bytes
    seconds: Number
    device: Text


@dataclass(frozen=True)
class Measure(Request, op="measure"):
    """Ask which of `count` configurations to measure next. `digest`: of everything that their measurements depend on.

    `timing` is what this rank has just measured of number `index`, as its backend encodes it.
    """

    digest: Digest
    count: int
    index: int | None = None
    timing: bytes | None = None


@dataclass(frozen=True)
class Record(Request, op="record"):
    """Add recipes, as `Recipe.to_wire` gives them, to a profile."""

    profile: str
    recipes: list[Any]


@dataclass(frozen=True)
class Deliver(Request, op="deliver"):
    """Spans of one process, as `Span.to_wire` gives them. The agent leaves malformed ones out, and counts them.

    `dropped`: spans that the process could not keep.
    """

    spans: list[Any] = dataclasses.field(default_factory=list)
    dropped: Count = 0


@dataclass(frozen=True)
class Profile(Request, op="profile"):
    """Ask where the profile is to be read. `sees_store` is false: this process has none, and the agent copies it to this node."""

    profile: str
    sees_store: bool = True


@dataclass(frozen=True)
class Announce(Request, op="announce"):
    """Keys that this job will ask for: `recipes`, now, and those of `profile`. Ask to start the pool that compiles them.

    `node` of `nodes` is this node's number in the job, as far as it is known; `cores` are those of each. `modules` are those that
    this process has imported: what other jobs compiled of them for `target` is a guess.

    `waits`: this process takes part in compiling `recipes` (`Next`), and lets the pool have at least `workers`.
    """

    recipes: list[Any] = dataclasses.field(default_factory=list)
    profile: str | None = None
    node: int = 0
    nodes: int = 1
    cores: Number = 1.0
    modules: list[Any] = dataclasses.field(default_factory=list)
    target: str = ""
    waits: bool = False
    workers: Count = 0


class Join(Request, op="join"):
    """A pool has started: it is the job's for as long as this connection is open."""


@dataclass(frozen=True)
class Take(Request, op="take"):
    """A worker of the pool is free. `memory`: bytes that are free where it runs, which may be a container of its own; `idle` and
    `left`: cores there, as `kcoord.cgroups.IdleCores` counts them.

    `ended` is how its last recipe ended: ``compiled``, ``loaded``, ``busy``, or ``failed`` and `why`. `last`: it takes no more.
    """

    memory: int
    idle: Number
    left: Number
    ended: str = ""
    why: str = ""
    last: bool = False


@dataclass(frozen=True)
class Next(Request, op="next"):
    """A warm-up's caller is free. `ended` is how its last recipe ended: ``compiled``, ``loaded``, ``busy`` or ``failed``."""

    ended: str = ""


class Status(Request, op="status"):
    """Ask for the agent's status, and what is under way."""


@dataclass(frozen=True)
class Stats(Request, op="stats"):
    """Ask for the figures of one job on this node; by default of the job that delivered spans last."""

    job: Job | None = None


class Stop(Request, op="stop"):
    """Tell the agent to end."""


@dataclass(frozen=True)
class Attend(Request, op="attend"):
    """A launcher of `job` uses the agent: it goes on for as long as this connection is open."""

    job: Job | None = None


class Leave(Request, op="leave"):
    """A launcher that attends the agent ends."""


class HandOver(Request, op="hand_over"):
    """The launcher that owns the agent ends."""


def parse_request(message: Mapping[str, Any]) -> tuple[int, Request]:
    """The request's id, and the request. Raises `ProtocolError`."""
    request = fields.field(message, "id", int)
    return request, _parsed(Request, message)


def parse_answer(message: Mapping[str, Any]) -> Answer:
    """Raises `ProtocolError`."""
    return _parsed(Answer, message)


def _parsed(base: type[M], message: Mapping[str, Any]) -> M:
    op = fields.field(message, "op", str)
    kind: type[M] | None = base.ops.get(op)
    if kind is None:
        raise ProtocolError(f"there is no {base.__name__.lower()} {op[:80]!r}")
    return kind.from_wire(message)
