"""Retention on a real NFS server: passes on some hosts beside jobs on others take nothing from them but time."""

from __future__ import annotations

from collections.abc import Callable

from tests.nfs.figures import Figures
from tests.nfs.rig import PROJECT, PYTHON, SOON, Job, Rank

_SECONDS = 8.0
_AT_ONCE = 1.0  # seconds of grace: in the very next pass; a fetch takes milliseconds
_MANY = 600


def test_readers_have_the_whole_of_an_artifact_or_a_miss_while_two_hosts_remove_everything(
    job: Callable[..., Job], figures: Figures, version: str
) -> None:
    """A publishes; B reads, as a waiter does and as a leader does; passes on C and on B remove whatever there is."""
    names = [f"moving-{n}" for n in range(6)]
    with job() as here:
        a, c, b = here.rank("A"), here.rank("C"), here.rank("B", "gc")
        waiter, leader = here.rank("B"), here.rank("B", "2")
        publishing = a.begin("store_publish_all", names=names, seconds=_SECONDS)
        passes = {
            host: rank.begin("collect_all", seconds=_SECONDS, grace=_AT_ONCE) for host, rank in (("C", c), ("B", b))
        }
        read = {
            "announced": waiter.begin("store_read", names=names, seconds=_SECONDS, announced=True),
            "led": leader.begin("store_read", names=names, seconds=_SECONDS),
        }
        did = {host: call.value() for host, call in passes.items()}
        assert publishing.value() > 0
        met: dict[str, int] = {}
        for how, call in read.items():
            for found, count in call.value().items():
                kind = "whole" if found.startswith("A") else found
                assert kind in ("whole", "missing") or (how, kind) == ("announced", "invalid"), (how, found)
                met[kind] = met.get(kind, 0) + count
        assert met["whole"] > 0
        assert met["missing"] > 0
        assert [done["errors"] for done in did.values()] == [[], []]
        assert all(done["removed"] for done in did.values())
        _nothing_is_left(here, c)
    figures.note(
        "reads while C and B remove all that A publishes: whole, missing, another than announced, torn", version,
        f"{met['whole']}, {met['missing']}, {met.get('invalid', 0)}, 0",
    )  # fmt: skip
    figures.note(
        "… passes of C and of B; artifacts removed by C, by B", version,
        f"{did['C']['passes']} and {did['B']['passes']}; {did['C']['removed']}, {did['B']['removed']}",
    )  # fmt: skip


def test_what_is_deleted_under_a_reader_is_a_miss(job: Callable[..., Job], figures: Figures, version: str) -> None:
    """Without a grace period: on v3 a reader meets ESTALE."""
    names = [f"moving-{n}" for n in range(6)]
    with job() as here:
        a, c, waiter = here.rank("A"), here.rank("C"), here.rank("B")
        publishing = a.begin("store_publish_all", names=names, seconds=_SECONDS)
        removing = c.begin("collect_all", seconds=_SECONDS, grace=-1.0)
        met = waiter.do("store_read", names=names, seconds=_SECONDS, announced=True)
        assert publishing.value() > 0
        assert removing.value()["errors"] == []
        kinds = {"whole" if found.startswith("A") else found for found in met}
        assert kinds <= {"whole", "missing", "invalid"}, met
        _nothing_is_left(here, c)
    figures.note(
        "reads while C deletes at once: missing or another than announced, torn, errors", version,
        f"{met.get('missing', 0) + met.get('invalid', 0)}, 0, 0",
    )  # fmt: skip


def test_what_a_pass_removed_is_compiled_again_and_the_agents_go_on(
    job: Callable[..., Job], figures: Figures, version: str
) -> None:
    """B and C are asked with empty local tiers. B's NFS client opens what it has linked, whole, until it reads the directory."""
    rounds = 5
    answers = []
    with job() as here:

        def forget(host: str) -> None:
            here.rig.on(host, f"rm -r {here.local(host)}/homes")

        a, b, c = here.rank("A"), here.rank("B"), here.rank("C")
        command = f"cd {PROJECT} && KCOORD_STORE={here.store} {PYTHON} -c 'from kcoord.cli import main; main()'"
        command += " gc --max-size 0 --least-age 0s"
        assert a.do("claim", name="kernel")["answer"] == "Lead"
        assert a.do("publish", name="kernel", writer="A") is True
        here.until_published(["kernel"])
        for n in range(rounds):
            assert c.do("claim", name="kernel")["answer"] == "Ready"
            here.rig.on("C", command)
            here.rig.on("B", f"ls {here.store}/v2/objects/*")
            answers.append(b.do("claim", name="kernel")["answer"])
            assert answers[-1] in ("Lead", "Alone"), "it is nowhere"
            assert b.do("publish", name="kernel", writer=f"B{n}") is True
            assert b.do("read", name="kernel") == f"B{n}"
            here.until_published(["kernel"])
            forget("C")
            if n < rounds - 1:
                forget("B")
        assert a.do("read", name="kernel") == "A"
        assert b.do("claim", name="kernel")["answer"] == "Ready"
        assert c.do("claim", name="kernel")["answer"] == "Ready"
        assert c.do("read", name="kernel") == f"B{rounds - 1}"
        assert [here.notices(rank) for rank in (a, b, c)] == [[], [], []]
        assert c.do("store_fetch", name="kernel")["found"] == f"B{rounds - 1}"
    figures.note(f"{rounds} times removed by `kcoord gc` on C, then asked for on B", version, ", ".join(answers))


def test_what_a_pass_costs(job: Callable[..., Job], figures: Figures, version: str) -> None:
    with job() as here:
        a, c = here.rank("A"), here.rank("C")
        a.do("store_publish", name="kernel", writer="A")
        settings = f"KCOORD_STORE={here.on_server} KCOORD_LOCAL_DIR={here.local('S')} PYTHONPATH={PROJECT}"
        line = f"cd {PROJECT} && {settings} {PYTHON} -c"
        here.rig.run(f"{line} 'from tests.nfs.guest.rank import fill; fill({_MANY})'")
        here.rig.run(f"chown -R --reference={here.on_server}/v2/staging {here.on_server}/v2/objects")
        before = c.do("rpcs", mount=here.mount)
        found = c.do("collect_once", within=5 * SOON, max_size=1 << 40)
        after = c.do("rpcs", mount=here.mount)
        assert found["artifacts"] == _MANY + 1
        each = sum(count - before.get(op, 0) for op, count in after.items()) / found["artifacts"]
    figures.note(
        f"a pass over {_MANY:,} artifacts that nobody on its host has looked at: seconds; RPCs for each", version,
        f"{found['seconds']:.1f} s; {each:.1f}",
    )  # fmt: skip


def _nothing_is_left(here: Job, last: Rank) -> None:
    """After a last pass by `last`: no staging, no trash, no quarantine."""
    while last.do("collect_all", seconds=0.1, grace=-1.0)["removed"]:
        pass
    last.do("collect_all", seconds=0.1, grace=-1.0)
    for name in ("staging", "trash", "quarantine"):
        left = here.rig.run(f"ls -A {here.on_server}/v2/{name} 2>/dev/null || true").split()
        assert left == [], (name, left)
