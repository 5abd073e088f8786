"""A writer of the store who has no signing key, and a job with ``KCOORD_TRUST=require``."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import struct
import sysconfig
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kcoord.artifacts.manifest import FileEntry, Manifest
from kcoord.artifacts.signing import OFF
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import StoreRoot
from kcoord.errors import ArtifactDistrusted, ArtifactInvalid, LeaseUnavailable, StoreError
from kcoord.files import sweep as sweep_module
from kcoord.files.atomic import with_check
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import Scope, current_device
from kcoord.leases.base import Lease, probe
from kcoord.leases.files import FileLeases
from kcoord.packs.exchange import decode_profile, export, import_artifacts
from kcoord.packs.pack import Pack
from kcoord.packs.recipe_files import HEAD, parts, save_part
from kcoord.packs.writing import write_pack
from kcoord.retention.limits import Limits
from kcoord.retention.pins import kept_by_pins, pin, uses_by_packs
from kcoord.retention.store_collector import collect
from kcoord.retention.tidying import Tidying
from kcoord.telemetry.events import Notices
from tests.support.artifacts import ORIGIN, publish
from tests.support.command import kcoord
from tests.support.packs import uses
from tests.support.profiles import recipe
from tests.support.sandbox import Sandbox, finish
from tests.support.signing import OURS, opened, trust
from tests.support.triton_ranks import hooked

# A wrong artifact, and a wrong word.


def test_a_failure_that_somebody_wrote_into_the_lease_files_fails_no_rank_of_compile_once(sandbox: Sandbox) -> None:
    store, key = sandbox.root / "store", CacheKey.of("test", "kernel")
    opened(store, OURS)

    async def write_a_failure() -> None:
        forger = FileLeases(store, ttl=15.0, limit=900.0, failure_ttl=30.0)
        lease = await forger.acquire(key.on(current_device(), Scope.DEVICE).digest, "evil", "evil")
        assert isinstance(lease, Lease)
        await lease.fail("no", "evil")
        await forger.close()

    asyncio.run(write_a_failure())
    job = {"KCOORD_STORE": str(store), "KCOORD_SIGNING_KEY": OURS, "KCOORD_TRUST": "require"}
    ranks = [sandbox.start("-c", ASKS, **job) for _ in range(3)]
    said = [finish(rank) for rank in ranks]
    assert [each.returncode for each in said] == [0, 0, 0], said[0].stderr
    assert len({each.stdout for each in said}) == 1, "its artifact is published on the node"


ASKS = """
import kcoord
artifact = kcoord.connect().get_or_compile(
    kcoord.CacheKey.of("test", "kernel"), lambda staging: (staging / "kernel.txt").write_text("a kernel")
)
print(artifact.path)
"""

MODULE = """
import json, sys, sysconfig
import triton.runtime.build as build
from triton.runtime.cache import _base32
text = sys.argv[1]
src = '#include <Python.h>\\nstatic struct PyModuleDef m = {PyModuleDef_HEAD_INIT, "one", "%s"};' % text
src += 'PyMODINIT_FUNC PyInit_one(void) { return PyModule_Create(&m); }'
asked, real = [], build.get_cache_manager
build.get_cache_manager = lambda key: asked.append(_base32(key)) or real(key)
built = build.compile_module_from_src(src, 'one')
print(json.dumps({"text": built.__doc__, "stock": asked[0], "path": built.__file__}))
"""
"""Builds a C module as Triton builds a launcher; prints its text, Triton's own key of it, and the file that was loaded."""

needs_c = pytest.mark.skipif(
    not (shutil.which("gcc") and (Path(sysconfig.get_path("include")) / "Python.h").exists()),
    reason="needs gcc and Python's headers, as Triton itself does on a GPU",
)


def module(sandbox: Sandbox, text: str, local: str, **more: str | None) -> dict[str, str]:
    done = sandbox.run("-c", MODULE, text, **hooked(sandbox, 0, local, **more))
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@needs_c
def test_a_module_that_lies_under_tritons_own_key_is_not_loaded_unverified(sandbox: Sandbox) -> None:
    a, b = (module(sandbox, text, "first", KCOORD_SPAWN="0") for text in "AB")
    planted = sandbox.root / "second" / "triton" / b["stock"]
    planted.mkdir(parents=True)
    shutil.copy(a["path"], planted)
    (sandbox.root / "second").chmod(0o700)
    assert module(sandbox, "B", "second", KCOORD_SPAWN="0")["text"] == "B"


# Deletes outside the store.


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory outside the store, with the names that `store_of_old` has."""
    home = tmp_path / "victim"
    for name in ("documents", f"{'a' * 64}.outcome", "old.spans"):
        (home / name).mkdir(parents=True) if name == "documents" else (home / name).write_text("mine")
    (home / "documents" / "thesis").write_text("mine")
    for path in home.iterdir():
        os.utime(path, (1e9, 1e9))
    return home


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    opened(root)
    return root


AT_ONCE = Tidying(quarantine_for=-1.0, traces_for=-1.0, grace=-1.0)


def files_of(directory: Path) -> dict[str, str]:
    return {str(p.relative_to(directory)): p.read_text() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    ("place", "entry"),
    [
        ("trash", "documents"),
        ("quarantine", "documents"),
        ("traces/job", "old.spans"),
        ("leases/ab", f"{'a' * 64}.outcome"),
    ],
)
def test_a_directory_that_becomes_a_link_while_it_is_tidied_leads_nowhere(
    root: Path, victim: Path, monkeypatch: pytest.MonkeyPatch, place: str, entry: str
) -> None:
    """The writer exchanges it between the moment in which it is listed and the one in which an entry is removed."""
    directory, before = root / "v2" / place, files_of(victim)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / entry).mkdir() if entry == "documents" else (directory / entry).write_text("bait")
    os.utime(directory / entry, (1e9, 1e9))
    scandir, listed = os.scandir, directory.stat()

    def exchanged(where: Any = ".") -> Any:
        found = os.stat(where)  # noqa: PTH116 - it may be a descriptor
        entries = scandir(where)
        if (found.st_dev, found.st_ino) == (listed.st_dev, listed.st_ino) and not directory.is_symlink():
            directory.rename(root / "aside")
            directory.symlink_to(victim)
        return entries

    monkeypatch.setattr(os, "scandir", exchanged)
    with contextlib.suppress(StoreError):
        collect(root, Limits(), tidying=AT_ONCE)
    assert directory.is_symlink(), "else nothing was attacked"
    monkeypatch.undo()
    with contextlib.suppress(StoreError):
        collect(root, Limits(), tidying=AT_ONCE)
    assert files_of(victim) == before


@pytest.mark.parametrize("place", ["trash", "quarantine"])
def test_a_link_in_the_place_of_v1_leads_nowhere(root: Path, victim: Path, place: str) -> None:
    (victim / place).mkdir()
    (victim / "documents").rename(victim / place / "documents")
    before = files_of(victim)
    shutil.rmtree(root / "v2")
    (root / "v2").symlink_to(victim)
    for _ in range(2):
        with contextlib.suppress(StoreError):
            collect(root, Limits(), tidying=AT_ONCE)
    assert files_of(victim) == before


def test_a_staging_directory_that_becomes_a_link_while_it_is_swept_leads_nowhere(
    root: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{os.uname().nodename}-1-{'0' * 20}"
    for directory in (root / "v2" / "staging", victim):
        (directory / name).mkdir()
        (directory / name / "file").write_text("mine")
    before = files_of(victim)
    real = sweep_module._owned

    def listed(*arguments: Any) -> Any:
        found = list(real(*arguments))
        (root / "v2" / "staging").rename(root / "aside")
        (root / "v2" / "staging").symlink_to(victim)
        return found

    monkeypatch.setattr(sweep_module, "_owned", listed)
    sweep_module.sweep(root / "v2" / "staging", elsewhere_after=-1.0, here_after=-1.0)
    assert files_of(victim) == before


def test_a_torn_artifact_is_not_moved_out_of_the_store(root: Path, victim: Path) -> None:
    store = opened(root)
    digest = publish(store, "torn")
    store.home(digest).write_bytes(b"torn")
    (root / "v2" / "quarantine").symlink_to(victim)
    before = sorted(victim.iterdir())
    with pytest.raises((ArtifactInvalid, StoreError)):
        store.fetch(digest)
    assert sorted(victim.iterdir()) == before


# Exhaustion.

BIG = 256 << 20  # bytes


def forged(store: Store, payload: int, *names: str, size: int = 1) -> str:
    """An artifact without a signature, with a sparse payload of `payload` bytes."""
    files = tuple(FileEntry(name, size, "0" * 64) for name in sorted(names or ("kernel",)))
    encoded = Manifest(key := CacheKey.of("test", "forged"), files, 1.0, ORIGIN).encode()
    home = store.home(key.digest)
    home.parent.mkdir(exist_ok=True)
    with home.open("wb") as file:
        file.write(b"kcoord-object-2\n" + struct.pack(">IQ", len(encoded), payload) + encoded)
        file.truncate(file.tell() + payload)
    return home.name


@contextlib.contextmanager
def little_memory(most: int) -> Iterator[None]:
    """The block allocates at most so many bytes at a time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def test_the_payload_of_an_artifact_that_is_not_trusted_is_not_read(root: Path) -> None:
    store = opened(root, OURS)
    digest = forged(store, BIG)
    for ask in (store.object, store.fetch):  # the latter moves it aside
        with little_memory(16 << 20), pytest.raises(ArtifactDistrusted):
            ask(digest)
    assert not store.home(digest).exists()


def test_an_artifact_that_needs_more_memory_than_is_free_is_left_where_it_is(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no signature is required: neither the payload is read, nor the artifact taken from nodes with more memory."""
    store = opened(root, policy="off")
    digest = forged(store, BIG, size=BIG)
    monkeypatch.setattr("kcoord.artifacts.object.free_memory", lambda: BIG)
    with little_memory(16 << 20), pytest.raises(ArtifactInvalid, match="of memory"):
        store.fetch(digest)
    assert store.home(digest).exists()


def test_a_payload_that_is_far_larger_than_its_files_is_not_read(root: Path) -> None:
    store = opened(root, policy="off")
    with little_memory(16 << 20), pytest.raises(ArtifactInvalid, match="too large for files of 1"):
        store.fetch(forged(store, BIG))


def test_a_payload_that_would_unpack_to_far_more_is_not_read(root: Path) -> None:
    store = opened(root, policy="off")
    with little_memory(16 << 20), pytest.raises(ArtifactInvalid, match="would unpack"):
        store.fetch(forged(store, 1 << 10, size=8 << 30))


@pytest.mark.parametrize(
    "name",
    ["a/" * 20_000 + "a", "a" * 40_000, "/" * 40_000, "a/" * 500 + "a"],
    ids=["deepest", "longest", "slashes", "deep"],
)
def test_a_name_of_any_length_and_depth_is_judged_at_once(root: Path, name: str) -> None:
    store = opened(root, policy="off")
    digest, begun = forged(store, 1, *(f"{n}{name}" for n in range(8))), time.process_time()
    with pytest.raises(ArtifactInvalid, match="too long, or too deep") as raised:
        store.fetch(digest)
    assert time.process_time() - begun < 1.0
    assert len(str(raised.value)) < 500


def test_many_names_are_judged_in_linear_time() -> None:
    files = tuple(FileEntry(f"{'d/' * 30}{n:05}", 0, "0" * 64) for n in range(10_000))
    encoded, begun = Manifest(CacheKey.of("test", "many"), files, 1.0, ORIGIN).encode(), time.process_time()
    Manifest.decode(encoded)
    assert time.process_time() - begun < 2.0


@pytest.mark.parametrize("inner", [[[]] * 100_000, {n: n for n in range(100_000)}, [[[]] * 3] * 50_000])
def test_an_envelope_that_holds_something_else_is_refused_unread(root: Path, inner: Any) -> None:
    """Its key id, its MAC or its content is a million values, which take far more memory than their bytes."""
    for envelope in ([inner, b"", b""], ["k", inner, b""], ["k", bytes(32), inner], inner):
        sealed = b"kcoord-signed-1\n" + msgpack.packb(envelope)
        with little_memory(4 * len(sealed)), pytest.raises(ArtifactInvalid, match="torn"):
            trust(OURS).doubt("manifest", sealed)


def tree(values: int) -> bytes:
    """A list of lists of empty lists: `values` bytes, each 56 in memory; no list in it is long."""
    rows = values // 1000
    return b"\xdd" + rows.to_bytes(4, "big") + (b"\xdc\x03\xe8" + 1000 * b"\x90") * rows


def test_a_part_of_a_profile_that_nobody_signed_and_that_would_take_much_memory_is_skipped(root: Path) -> None:
    directory, content = root / "v2" / "profiles" / "job", with_check(HEAD, tree(4 << 20))
    save_part(directory, [recipe("kernel", 1.0)])
    (directory / f"{'f' * 64}.recipes").write_bytes(content)
    notices = Notices()
    assert len(parts(directory, notices)) == 1
    assert "values" in notices.since(0)[0][0]


def test_a_profile_of_a_bundle_takes_no_more_memory_than_its_bytes() -> None:
    for content in (b"\x92\xc4\x00" + tree(2 << 20), b"\x92" + tree(4 << 20) + b"\x90"):
        with little_memory(2 * len(content)), pytest.raises(ValueError, match="values"):
            decode_profile(content)


def test_a_manifest_takes_no_more_memory_than_its_bytes() -> None:
    content = b"\x81\xa6format" + tree(2 << 20)
    with little_memory(2 * len(content)), pytest.raises(ArtifactInvalid, match="values"):
        Manifest.decode(content)


def test_packs_that_nobody_signs_are_bounded_together(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is within its own bound."""
    monkeypatch.setattr("kcoord.retention.pins._MOST_KEPT", 10)
    for n in range(5):
        write_pack(opened(root), f"p{n}", uses(f"{n:02x}{m:062x}" for m in range(4)))
        pin(root, f"p{n}")
    assert len(uses_by_packs(root, OFF)) == 10
    with pytest.raises(StoreError, match="more than 10 artifacts"):
        kept_by_pins(root, OFF)


# Laundering.


@pytest.fixture
def mixed(root: Path) -> tuple[str, str]:
    """The digests of an artifact of ours, and of one that the writer has put beside it."""
    return publish(opened(root, OURS), "ours"), publish(opened(root, policy="off"), "theirs")


@pytest.mark.parametrize("policy", ["off", "require"])
def test_an_export_with_a_key_vouches_for_what_is_signed_alone(
    root: Path, tmp_path: Path, mixed: tuple[str, str], policy: str
) -> None:
    ours, theirs = mixed
    done = export(opened(root, OURS, policy=policy), uses(mixed), {}, tmp_path / "b.kcb")
    assert (done.artifacts, set(done.left_out)) == (1, {theirs})
    there = opened(tmp_path / "there", OURS)
    with Pack(tmp_path / "b.kcb", there) as bundle:
        import_artifacts(bundle, there)
    assert list(there.digests()) == [ours]


def test_a_profiles_part_without_a_signature_is_not_signed_by_moving_it(sandbox: Sandbox, root: Path) -> None:
    """A part names functions that ranks import and call."""
    profile = root / "v2" / "profiles" / "p"
    save_part(profile, [recipe(1)], trust=trust(OURS))
    save_part(profile, [recipe(66)])
    key, bundle = {"KCOORD_SIGNING_KEY": OURS}, str(sandbox.root / "b.kcb")
    kcoord(sandbox, "export", "p", bundle, KCOORD_STORE=str(root), KCOORD_TRUST="off", **key)
    for importing in ("require", "off"):
        there = sandbox.root / importing
        kcoord(sandbox, "import", bundle, KCOORD_STORE=str(there), KCOORD_TRUST=importing, **key)
        found = parts(there / "v2" / "profiles" / "p", Notices(), trust(OURS))
        assert [r.digest for r in found] == [recipe(1).digest]


# Links in the place of directories.


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory of the job's user, to which the writer of the store leads."""
    directory = tmp_path / "outside"
    directory.mkdir()
    return directory


def lead(place: Path, outside: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(outside)


@pytest.mark.parametrize("name", ["v2/staging", "v2"])
def test_nothing_is_published_through_a_link_in_the_place_of_a_directory(root: Path, outside: Path, name: str) -> None:
    store = opened(root, OURS)
    publish(store, "before")
    (outside / "staging").mkdir()
    lead(root / name, outside)
    with pytest.raises(StoreError):
        publish(store, "after")
    with pytest.raises(StoreError):
        StoreRoot(root).check()
    assert list(outside.rglob("*")) == [outside / "staging"]


@pytest.mark.parametrize("name", ["v2/profiles/job", "v2/profiles", "v2/packs/job", "v2/packs"])
def test_no_part_of_a_profile_and_no_pack_is_written_through_a_link(root: Path, outside: Path, name: str) -> None:
    store = opened(root, OURS)
    lead(root / name, outside)
    part = functools.partial(save_part, root / "v2" / "profiles" / "job", [recipe("kernel", 1.0)])
    pack = functools.partial(write_pack, store, "job", uses(["a" * 64]))
    with pytest.raises(StoreError):
        (pack if "packs" in name else part)()
    assert list(outside.rglob("*")) == []


@pytest.mark.parametrize("name", ["v2/leases", "v2/staging"])
def test_no_lease_file_is_made_through_a_link(root: Path, outside: Path, name: str) -> None:
    opened(root, OURS)
    lead(root / name, outside)

    async def ask() -> None:
        leases = FileLeases(root, ttl=10.0, limit=300.0, failure_ttl=10.0)
        with pytest.raises(LeaseUnavailable):
            await probe(leases)
        with contextlib.suppress(LeaseUnavailable):
            await leases.acquire("a" * 64, "1", "node")
        await leases.close()

    asyncio.run(ask())
    assert list(outside.rglob("*")) == []
