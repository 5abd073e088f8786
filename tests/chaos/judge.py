"""What must hold after a round, whatever was thrown. A finding is a sentence that says what did not.

The rule of waits: a request takes no longer than another rank's compile and what each fault excuses that was there meanwhile,
which is what kcoord promises to notice it in, however long the fault lasts.

The rule of duplicates: a key is compiled once, and once more for each that a fault excuses (see `kinds.Kind`) which met the key:
a compile of it, from its request until it had gone to the store, was under way where and while the fault was. A compile whose
process did not live to hand it in is not counted.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcoord.artifacts import local
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files.sweep import sweep
from tests.chaos.compiler import fault_of, key_of
from tests.chaos.journal import Reader
from tests.chaos.kinds import AGENT_TIMEOUT, HEDGE_AFTER, LEASE_LIMIT, LEASE_TTL, MAX_WAIT, RANKS, SLOW
from tests.chaos.schedule import Round
from tests.chaos.site import Site
from tests.chaos.throw import Thrown
from tests.support.redis_server import RedisServer

_LONGEST_REQUEST = (
    2 * MAX_WAIT + 4 * AGENT_TIMEOUT + 2.0
)  # an agent is found dead, another started, asked, and found dead
_LONGEST_PUBLISH = 4 * AGENT_TIMEOUT + 2.0
_REAPED_WITHIN = 10.0  # seconds until init has waited for a process that ended
_START = 30.0  # seconds that a rank waits for the process that starts an agent
_PROMPT = 1.0  # seconds that a request takes, at most, besides the compile, if nothing is wrong
_BEFORE = 1.0  # seconds after its compile in which an artifact is on its way to the store
_CODES = {"rank-kill": {-9}, "rank-term": {-15}, "rank-raises": {1}}
_ORDERED = {"kill": {-9}, "term": {-15}, "exit": {3}, "segfault": {-11}}
ALARMING = re.compile(
    r"please report it|never awaited|never retrieved|Traceback|Exception ignored|^\s*File |Fatal Python"
)
_NO_START = "the agent did not start"
_HARMLESS = re.compile(r"OrderedToRaise")


@dataclass
class Verdict:
    """What a round came to. Times in seconds."""

    round: Round
    findings: list[str]
    took: float
    thrown: list[Thrown]
    slowness: float = 1.0  # how much slower than an idle machine this one may have been
    compiles: int = 0
    lost: int = 0
    duplicates: int = 0
    longest_wait: float = 0.0
    longest_publish: float = 0.0
    kept: Path | None = None


@dataclass
class Told:
    """A rank's journal."""

    node: int
    rank: int
    events: list[dict[str, Any]] = field(default_factory=list)

    def of(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]

    @property
    def first(self) -> dict[str, Any] | None:
        """The end of its first request."""
        return next((e for e in self.events if e["event"] in ("served", "compiles")), None)


def judge(
    round_: Round,
    directory: Path,
    sites: list[Site],
    thrown: list[Thrown],
    codes: list[int | None],
    took: float,
    slowness: float,
    late: bool,
    redis: RedisServer | None,
    store: Path | None,
) -> Verdict:
    told = [
        Told(n, r, Reader(directory / f"rank-{n}-{r}.jsonl").new()) for n in range(round_.nodes) for r in range(RANKS)
    ]
    _place_orders(thrown, told)
    findings = []
    if late:
        findings.append(
            f"the round had not ended after {took:.0f} s: its bound is {round_.bound:.0f} s on an idle machine"
        )
    findings += [f"node {n} ended with code {code}" for n, code in enumerate(codes) if code]
    if not late:
        findings += [f"rank {t.rank} of node {t.node} did not finish" for t in told if len(t.of("done")) != 1]
    verdict = Verdict(round_, findings, took, thrown, slowness)
    findings += _deaths(thrown, sites)
    findings += _wrong(round_, thrown, told)
    findings += waits_too_long(verdict, told)
    findings += duplicates_without_reason(verdict, told)
    findings += _logs(sites)
    if not late:
        findings += _left_over(round_, thrown, sites, redis, store)
        findings += _artifacts(round_, thrown, sites, store)
    return verdict


def _place_orders(thrown: list[Thrown], told: list[Told]) -> None:
    """An order is carried out in the rank's next compile, or never."""
    for one in thrown:
        if one.fault.kind not in ("rank-dies-compiling", "rank-raises"):
            continue
        (rank,) = [t for t in told if (t.node, t.rank) == (one.fault.node, one.fault.rank)]
        carried = [e for e in rank.of("obeys") if e["t"] >= one.began]
        one.met = bool(carried)
        if carried:
            one.began = one.ended = carried[0]["t"]


def _deaths(thrown: list[Thrown], sites: list[Site]) -> list[str]:
    findings = []
    for site in sites:
        for rank in range(RANKS):
            excused: Counter[int] = Counter()
            for one in thrown:
                if one.met and (one.fault.node, one.fault.rank) == (site.number, rank):
                    dies = one.fault.kind == "rank-dies-compiling"
                    excused.update(_ORDERED[one.fault.detail] if dies else _CODES.get(one.fault.kind, ()))
            died = Counter(d["code"] for d in site.deaths if d["rank"] == rank and d["code"] != 0)
            for code, count in (died - excused).items():
                findings.append(f"rank {rank} of node {site.number} ended {count} times with code {code}, by itself")
    return findings


def _wrong(round_: Round, thrown: list[Thrown], told: list[Told]) -> list[str]:
    """Files may be harmed after they were verified, and before the rank has looked at them."""
    findings = []
    for rank in told:
        for event in rank.of("wrong"):
            harmed = [
                o for o in thrown
                if o.met and o.fault.node == rank.node and event["asked"] - 0.5 <= o.began <= event["t"] and (
                    o.fault.kind == "local-removed"
                    or (o.fault.kind == "artifact-on-node" and round_.kernels[o.fault.kernel].name == event["kernel"])
                )
            ]  # fmt: skip
            if not harmed:
                findings.append(
                    f"rank {rank.rank} of node {rank.node} was given a wrong {event['kernel']}: {event['why']}"
                )
    return findings


def waits_too_long(verdict: Verdict, told: list[Told]) -> list[str]:
    findings = []
    for rank in told:
        for event in [*rank.of("served"), *rank.of("compiles"), *rank.of("compiled")]:
            publishing = event["event"] == "compiled"
            until = event["t"] if publishing else event["asked"] + event["took"]
            took = event["took"] - _stood_still(verdict.thrown, rank, until - event["took"], until)
            if publishing:
                verdict.longest_publish = max(verdict.longest_publish, took)
            else:
                verdict.longest_wait = max(verdict.longest_wait, took)
            promised = _LONGEST_PUBLISH if publishing else _LONGEST_REQUEST
            most = min(promised, _excused_wait(verdict, rank, event, until - event["took"], until))
            if took > most:
                what = "publishing" if publishing else "a request"
                who = f"rank {rank.rank} of node {rank.node}"
                findings.append(f"{what} of {event['kernel']} took {who} {took:.1f} s: {most:.1f} s are excused")
    return findings


def _excused_wait(verdict: Verdict, rank: Told, event: dict[str, Any], begin: float, end: float) -> float:
    """Seconds: another rank's compile on a busy machine, and what each fault costs that was there meanwhile."""
    (kernel,) = [k for k in verdict.round.kernels if k.name == event["kernel"]]
    excused = (_PROMPT + kernel.seconds) * verdict.slowness + min(kernel.hangs, LEASE_LIMIT)
    for one in verdict.thrown:
        row = one.fault.row
        if one.met and one.began < end and begin < one.ended + max(row.after, row.costs, row.alone):
            excused += (row.costs if row.holds is None else row.holds) + min(
                one.fault.seconds, _noticed(one, rank, event)
            )
    return excused


def _noticed(one: Thrown, rank: Told, event: dict[str, Any]) -> float:
    """Seconds after which the rank goes on without what is hit, however long the fault lasts."""
    row, of_agent = one.fault.row, one.fault.kind in ("agent-stop", "agent-hang")
    if of_agent and event["event"] == "compiled":
        return 2 * AGENT_TIMEOUT
    if of_agent and one.fault.node == rank.node and event["asked"] <= one.began and event is rank.first:
        return _START  # the rank has begun to start the agent
    return min(row.noticed, row.noticed_here) if one.fault.node == rank.node else row.noticed


def _stood_still(thrown: list[Thrown], rank: Told, begin: float, end: float) -> float:
    """Seconds of an interval in which the rank itself was stopped."""
    stops = [
        (max(begin, o.began), min(end, o.ended))
        for o in thrown
        if o.met and o.fault.kind == "rank-stop" and (o.fault.node, o.fault.rank) == (rank.node, rank.rank)
    ]
    total, reached = 0.0, begin
    for start, stop in sorted(stops):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def duplicates_without_reason(verdict: Verdict, told: list[Told]) -> list[str]:
    compiles: dict[str, list[tuple[Told, dict[str, Any]]]] = defaultdict(list)
    for rank in told:
        for event in rank.of("compiled"):
            compiles[event["kernel"]].append((rank, event))
        verdict.lost += len(rank.of("compiles")) - len(rank.of("compiled"))
    findings = []
    for number, kernel in enumerate(verdict.round.kernels):
        done = compiles[kernel.name]
        verdict.compiles += len(done)
        verdict.duplicates += max(0, len(done) - 1)
        excused = 1 + (SLOW + int(kernel.hangs / LEASE_LIMIT) if kernel.hangs else 0)
        if kernel.seconds > HEDGE_AFTER:
            excused += min(1, sum(e["how"] == "hedges" for _, e in done))
        excused += sum(_excused(o, number, kernel.name, done, told) for o in verdict.thrown)
        if len(done) > excused:
            begin = min((o.began for o in verdict.thrown), default=0.0)
            who = "; ".join(
                f"rank {r.rank} of node {r.node}, {e['how']}{': ' + e['note'] if e['note'] else ''}"
                f", {e['outcome']}, {e['asked'] - begin:.2f}–{e['t'] - begin:.2f} s"
                for r, e in sorted(done, key=lambda c: c[1]["t"])
            )
            findings.append(f"{kernel.name} was compiled {len(done)} times, {excused} are excused: {who}")
    return findings


def _excused(one: Thrown, number: int, name: str, done: list[tuple[Told, dict[str, Any]]], told: list[Told]) -> int:
    """How many compiles of a kernel a fault excuses, besides the first."""
    fault, row = one.fault, one.fault.row
    if not one.met:
        return 0
    if row.hits == "key":
        return row.duplicates if fault.kernel == number else 0
    if fault.kind == "rank-raises":
        (rank,) = [t for t in told if (t.node, t.rank) == (fault.node, fault.rank)]
        compiling = [e["kernel"] for e in rank.of("compiles") if e["t"] <= one.began][-1:]
        return row.duplicates if compiling == [name] else 0
    met = [
        e
        for r, e in done
        if (row.hits == "all" or r.node == fault.node) and (row.hits != "rank" or r.rank == fault.rank)
    ]
    under_way = any(e["asked"] < one.ended + row.after and one.began - _BEFORE < e["t"] for e in met)
    here = [e for r, e in done if row.hits == "all" or r.node == fault.node]
    alone = sum(e["how"] == "alone" and one.began < e["t"] and e["asked"] < one.ended + row.alone for e in here)
    return (row.duplicates if under_way else 0) + alone


def _logs(sites: list[Site]) -> list[str]:
    findings = []
    for site in sites:
        for path in [site.log, *site.logs()]:
            text = path.read_text(errors="replace")
            for block in without_ordered(text):
                if ALARMING.search(block):
                    findings.append(f"{path.name}: {block.strip()[:2000]}")
                    break
    return findings


def without_ordered(text: str) -> list[str]:
    """The log in pieces: a traceback is one, and those that a rank was ordered to die of are left out."""
    pieces, piece = [], ""
    for line in text.splitlines(keepends=True):
        if piece and not line.startswith(" "):
            if piece.startswith("Traceback"):
                piece += line
                pieces.append(piece)
                piece = ""
                continue
            pieces.append(piece)
            piece = ""
        piece += line
    return [p for p in [*pieces, piece] if not _HARMLESS.search(p)]


def _left_over(
    round_: Round, thrown: list[Thrown], sites: list[Site], redis: RedisServer | None, store: Path | None
) -> list[str]:
    """Processes, sockets, leases, and, once what dead writers left has been swept, staged files."""
    findings = []
    killed = {o.fault.node for o in thrown if o.met and o.fault.kind == "agent-kill"}
    # it was told to end before it had a handler for that
    killed |= {site.number for site in sites if site.log.exists() and _NO_START in site.log.read_text()}
    for site in sites:
        findings += [f"process {pid} of node {site.number} is left: {command}" for pid, command in site.processes()]
        sockets = [str(path) for path in site.sockets()]
        if sockets and not (round_.launcher == "ranks" and site.number in killed):
            findings.append(f"a socket of node {site.number} is left: {sockets}")
    if redis is not None:
        findings += _leases_left(round_, thrown, redis)
    failed = any(o.met and o.fault.kind.startswith("store-") for o in thrown)
    if store is not None and not killed and not failed:
        # what a killed agent leaves, and what a store that takes no writes keeps, ends by its TTL, which is seen by who asks
        findings += [f"a lease file is left: {p.name}" for p in (store / "v2" / "leases").glob("*/*.lease")]
    stagings = [p for site in sites for p in site.local.glob("objects/*/.kcoord/staging")]
    for staging in [*stagings, *([store / "v2" / "staging"] if store is not None else [])]:
        left = _swept(staging)
        findings += [f"{staging} holds {left} after it was swept"] if left else []
    return findings


def _swept(staging: Path) -> list[str]:
    """The names that are left once the processes that have ended are gone, too: until then they own their entries."""
    end = time.monotonic() + _REAPED_WITHIN
    while True:
        sweep(staging, here_after=0.0, elsewhere_after=0.0)
        left = [p.name for p in staging.iterdir()] if staging.exists() else []
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


def _leases_left(round_: Round, thrown: list[Thrown], redis: RedisServer) -> list[str]:
    """No lease outlives its TTL, unless the server's clock was set back, and then until somebody asks for it."""
    if any(o.met and o.fault.kind == "redis-clock" for o in thrown):
        return []
    planted = {
        key_of(round_.name, round_.kernels[o.fault.kernel]).digest
        for o in thrown
        if o.met and o.fault.kind == "redis-garbage"
    }
    deadline = time.monotonic() + LEASE_TTL + 1.0
    while True:
        held = [name for name in _names(redis) if b"\r\nL" in redis.command("GET", name)]
        held = [name for name in held if name.decode().rpartition(":")[2] not in planted]
        if not held or time.monotonic() > deadline:
            return [f"a lease is left in Redis: {name.decode()}: {redis.command('GET', name)!r}" for name in held]
        time.sleep(0.1)


def _names(redis: RedisServer) -> list[bytes]:
    reply = redis.command("KEYS", "kcoord:*:lease:*")
    return [line for line in reply.split(b"\r\n") if line.startswith(b"kcoord:")]


def _artifacts(round_: Round, thrown: list[Thrown], sites: list[Site], store: Path | None) -> list[str]:
    """Whatever is visible is whole, right and of one writer, but for what was harmed after the last look at it."""
    harmed_in_store = {o.fault.kernel for o in thrown if o.met and o.fault.kind == "artifact-in-store"}
    harmed = {(o.fault.node, o.fault.kernel) for o in thrown if o.met and o.fault.kind == "artifact-on-node"}
    findings = []
    for number, kernel in enumerate(round_.kernels):
        key = key_of(round_.name, kernel)
        for site in sites:
            home = site.local / "objects" / key.digest[:2] / key.digest
            if (site.number, number) not in harmed and home.exists():
                wrong = fault_of(home, key, kernel.size) or ("" if local.is_whole(home, key.digest) else "not whole")
                findings += [f"{kernel.name} on node {site.number} is wrong: {wrong}"] if wrong else []
        if store is None or number in harmed_in_store:
            continue
        try:
            found = Store(store).fetch(key.digest, None)
        except (StoreError, ArtifactInvalid) as error:
            findings.append(f"{kernel.name} in the store is wrong: {error}")
        else:
            if found is not None and found[1]["first"] != found[1]["last"]:
                findings.append(f"{kernel.name} in the store has two writers")
    return findings
