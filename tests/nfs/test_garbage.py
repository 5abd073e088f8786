"""Garbage in the store, as another client host sees it: refused, compiled again, and the good copies stay."""

from __future__ import annotations

from collections.abc import Callable

from tests.nfs.figures import Figures
from tests.nfs.rig import Job

_GARBAGE = {
    "truncated-payload": "head -c -7 $it > short && mv short $it",
    "flipped-byte": r"printf '\377' | dd of=$it bs=1 seek=$(($(stat -c %s $it) - 60)) conv=notrunc status=none",
    "truncated-manifest": "truncate -s 100 $it",
    "empty-file": ": > $it",
    "link": "mv $it ../away && ln -s ../away $it",
    "pipe": "rm $it && mkfifo $it",
    "directory": "rm $it && mkdir $it",
}


def test_garbage_in_the_store_is_refused_and_compiled_again_and_the_good_local_copies_stay(
    job: Callable[..., Job], figures: Figures, version: str
) -> None:
    with job() as here:
        a, b = here.rank("A"), here.rank("B")
        for name in _GARBAGE:
            assert a.do("claim", name=name)["answer"] == "Lead"
            assert a.do("publish", name=name, writer="A") is True
        here.until_published(list(_GARBAGE))
        for name, spoil in _GARBAGE.items():
            bucket, _, digest = here.home(name).rpartition("/")
            here.rig.run(f"it={digest}; cd {here.on_server}/{bucket} && {spoil}")
        for name in _GARBAGE:
            assert b.do("claim", name=name)["answer"] == "Lead", f"{name} is taken"
            assert b.do("publish", name=name, writer="B") is True
        c = here.rank("C")
        for name in _GARBAGE:
            assert c.do("claim", name=name)["answer"] == "Ready", name
            assert c.do("read", name=name) == "B"
            assert a.do("read", name=name) == "A", "the copy of the node that compiled it is its own"
            assert a.do("store_fetch", name=name)["found"] in ("A", "B"), (
                "its client may remember the file that it wrote"
            )
    figures.note(
        f"{len(_GARBAGE)} kinds of garbage in the store: taken by B; compiled again", version, f"0; {len(_GARBAGE)}"
    )


def test_one_host_that_reads_garbage_takes_nothing_from_the_others(job: Callable[..., Job], version: str) -> None:
    """B alone sees a spoilt object, as a host with a bad cache or cable does: over the good file another one is mounted."""
    with job() as here:
        a, b, c = here.rank("A"), here.rank("B"), here.rank("C")
        assert a.do("claim", name="kernel")["answer"] == "Lead"
        assert a.do("publish", name="kernel", writer="A") is True
        here.until_published(["kernel"])
        manifest = c.do("store_fetch", name="kernel")["manifest"]
        stored = f"{here.store}/{here.home('kernel')}"
        spoilt = f"{here.local('B')}/spoilt"
        here.rig.on("B", f"cp {stored} {spoilt} && truncate -s -7 {spoilt} && mount --bind {spoilt} {stored}")
        try:
            assert b.do("store_fetch", name="kernel", announced=manifest)["found"] == "invalid"
            assert c.do("store_fetch", name="kernel", announced=manifest)["found"] == "A", "it is where it was"
        finally:
            here.rig.on("B", f"umount {stored}")
        assert b.do("claim", name="kernel")["answer"] == "Ready"
        assert b.do("read", name="kernel") == "A"
