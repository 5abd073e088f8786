"""Bundles: what leaves one store arrives whole in another, and of a file that is not whole nothing does."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kcoord.artifacts import local
from kcoord.artifacts.object import StoredObject
from kcoord.artifacts.signing import PACK, Trust, split
from kcoord.artifacts.store import Store
from kcoord.errors import StoreError
from kcoord.keys import CacheKey
from kcoord.packs.exchange import decode_profile, encode_profile, export, import_artifacts
from kcoord.packs.index import Index, PackInvalid, Use
from kcoord.packs.pack import Pack
from kcoord.packs.pack_files import packs_of
from kcoord.packs.recipe import today
from kcoord.packs.recipe_files import parts, save_part
from kcoord.packs.writing import write_pack
from kcoord.telemetry.events import Notices
from kcoord.testing.stores import FILES, manifest_of
from tests.support import packs
from tests.support.fuzzing import fuzz
from tests.support.objects import payload_of
from tests.support.packs import listed_in, uses
from tests.support.profiles import recipe
from tests.support.sandbox import Sandbox, eventually, finish
from tests.support.signing import OURS, THEIRS, opened, trust, unsigned

KEYS = [CacheKey.of("test", f"kernel {n}") for n in range(4)]
DIGESTS = sorted(key.digest for key in KEYS)


def filled(root: Path, *keys: str, count: int = 4) -> Store:
    store = opened(root, *keys)
    for key in KEYS[:count]:
        store.publish(manifest_of(key=key), FILES)
    return store


def exported(store: Store, out: Path, **profiles: bytes) -> Path:
    export(store, uses(store.digests()), profiles, out)
    return out


def imported(path: Path, store: Store) -> tuple[int, int]:
    with Pack(path, store) as bundle:
        bundle.verify()
        done = import_artifacts(bundle, store)
    return done.published, done.kept


def contents(store: Store) -> dict[str, tuple[bytes, bytes]]:
    found = {}
    for digest in store.digests():
        artifact = store.object(digest)
        assert artifact is not None
        found[digest] = artifact.encoded, artifact.payload
    return found


def test_what_is_exported_arrives_byte_for_byte_and_is_exported_as_the_same_file(tmp_path: Path) -> None:
    here, there = filled(tmp_path / "here", OURS), opened(tmp_path / "there", OURS)
    one = exported(here, tmp_path / "one.kcb", p=b"a profile")
    assert imported(one, there) == (4, 0)
    assert contents(there) == contents(here)
    two = exported(there, tmp_path / "two.kcb", p=b"a profile")
    assert one.read_bytes() == two.read_bytes()
    with Pack(two, there) as bundle:
        assert list(bundle.profiles()) == [("p", b"a profile")]


def test_an_import_can_be_begun_again_and_keeps_what_is_there(tmp_path: Path) -> None:
    bundle = exported(filled(tmp_path / "here", OURS), tmp_path / "b.kcb")
    there = filled(tmp_path / "there", OURS, count=2)
    before = contents(there)
    assert imported(bundle, there) == (2, 2)
    assert {d: c for d, c in contents(there).items() if d in before} == before
    assert imported(bundle, there) == (0, 4)


def test_a_damaged_artifact_is_replaced_by_the_bundles(tmp_path: Path) -> None:
    bundle = exported(filled(tmp_path / "here", OURS), tmp_path / "b.kcb")
    there = filled(tmp_path / "there", OURS)
    there.home(DIGESTS[0]).write_bytes(b"torn")
    unsigned(there.home(DIGESTS[1]))
    assert imported(bundle, there) == (2, 2)
    assert set(contents(there)) == set(DIGESTS)


def test_artifacts_that_a_retired_key_signed_are_signed_anew_by_moving_them(tmp_path: Path) -> None:
    here = filled(tmp_path / "here", THEIRS)
    here.trust = trust(OURS, THEIRS)
    there = opened(tmp_path / "there", OURS)
    assert imported(exported(here, tmp_path / "b.kcb"), there) == (4, 0)
    assert set(contents(there)) == set(DIGESTS)


def test_what_nobody_vouches_for_is_not_signed_by_importing_it(tmp_path: Path) -> None:
    bundle = exported(filled(tmp_path / "here"), tmp_path / "b.kcb")
    there = opened(tmp_path / "there", OURS, policy="off")
    assert imported(bundle, there) == (4, 0)
    assert {split(encoded)[1] for encoded, _ in contents(Store(there.root)).values()} == {None}


def test_a_pipe_or_a_device_is_not_replaced_by_an_export(tmp_path: Path) -> None:
    out = tmp_path / "out"
    os.mkfifo(out)
    with pytest.raises(StoreError, match="no plain file"):
        exported(filled(tmp_path / "here"), out)
    assert out.is_fifo()


def test_an_export_names_what_it_leaves_out(tmp_path: Path) -> None:
    store = filled(tmp_path / "here", OURS)
    gone = "f" * 64
    store.home(DIGESTS[1]).write_bytes(b"torn")
    unsigned(store.home(DIGESTS[2]))
    done = export(store, uses([gone, *DIGESTS]), {}, tmp_path / "b.kcb")
    assert done.artifacts == 2
    assert set(done.left_out) == {gone, *DIGESTS[1:3]}
    assert "not signed" in done.left_out[DIGESTS[2]]
    assert imported(tmp_path / "b.kcb", opened(tmp_path / "there", OURS)) == (2, 0)


def test_an_export_that_fails_leaves_the_earlier_file_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "here")
    exported(store, tmp_path / "b.kcb")
    before = (tmp_path / "b.kcb").read_bytes()

    def fails_at_last(done: int, every: int) -> None:
        if done == every:
            raise StoreError("the store fails")

    with pytest.raises(StoreError, match="the store fails"):
        export(store, uses(DIGESTS), {}, tmp_path / "b.kcb", fails_at_last)
    assert (tmp_path / "b.kcb").read_bytes() == before, "half a file never takes the place of a whole one"
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["b.kcb"]


# --- strangers' files ---


@pytest.fixture(scope="module")
def sample() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as directory:
        store = filled(Path(directory) / "s", count=2)
        text = encode_profile([recipe(1)], [KEYS[0].digest])
        yield exported(store, Path(directory) / "b.kcb", p=text).read_bytes()


def refused(content: bytes, judge: Trust | None = None) -> str:
    """Why a file with this content is refused: by the time that it is verified, and nothing else is raised."""
    with pytest.raises(PackInvalid) as caught:
        verified(content, judge or Trust())
    return str(caught.value)


def verified(content: bytes, judge: Trust) -> list[tuple[str, bytes]]:
    """The artifacts and profiles of a file with this content."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "b.kcb"
        path.write_bytes(content)
        with Pack(path, Store(path.parent, judge)) as pack:
            # zstd has bits that mean nothing
            found = [(e.manifest.key.digest, e.encoded + b"".join(e.contents().values())) for e in pack.objects()]
            for name, text in pack.profiles():
                decode_profile(text)
                found.append((name, text))
            return found


def made(index: Any, blobs: bytes = b"") -> bytes:
    data = index if isinstance(index, bytes) else bytes(msgpack.packb(index))
    return MAGIC + blobs + data + len(data).to_bytes(8, "big")


MAGIC = b"kcoord-pack-1\n"


def entry(digest: str, artifact: bytes, manifest: bytes = b"", place: str = "", day: int = 0) -> list[Any]:
    return [bytes.fromhex(digest), place, day, len(artifact), hashlib.sha256(manifest).digest()]


def index_of(
    *artifacts: list[Any], listed: list[list[Any]] | None = None, profiles: list[list[Any]] | None = None
) -> list[Any]:
    return [1, list(artifacts), listed or [], profiles or []]


@given(st.data())
@fuzz(150)
def test_a_file_that_was_cut_is_refused(sample: bytes, data: st.DataObject) -> None:
    refused(sample[: data.draw(st.integers(0, len(sample) - 1))])


@given(st.data())
@fuzz(200)
def test_a_file_with_one_changed_byte_is_refused_or_holds_the_same_artifacts(
    sample: bytes, data: st.DataObject
) -> None:
    """In an index that nobody signed another place, day or name may stand."""
    changed = bytearray(sample)
    position = data.draw(st.integers(0, len(sample) - 1))
    changed[position] ^= data.draw(st.integers(1, 255))
    try:
        found = verified(bytes(changed), Trust())
    except PackInvalid:
        return
    assert [content for _, content in found] == [content for _, content in verified(sample, Trust())]


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**60) | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.tuples(st.just(1), _PLAIN, _PLAIN, _PLAIN))
@fuzz(200)
def test_an_index_of_anything_is_read_or_refused(index: tuple[Any, ...]) -> None:
    try:
        found = Index.decode(msgpack.packb(index))
    except PackInvalid:
        return
    assert found.encode() == Index.decode(found.encode()).encode()


_DIGEST, _HASH = "a" * 64, hashlib.sha256(b"").digest()
_RAW = bytes.fromhex(_DIGEST)
_BAD: dict[str, tuple[Any, str]] = {
    "a path for a digest": (index_of(["../../etc/passwd", "", 0, 0, _HASH]), "no SHA-256"),
    "a short digest": (index_of([_RAW[1:], "", 0, 0, _HASH]), "no SHA-256"),
    "a digest twice": (index_of(entry(_DIGEST, b""), listed=[[_RAW, "", 0]]), "twice"),
    "a place outside the tiers": (index_of(listed=[[_RAW, "../x", 0]]), "no place"),
    "a place that is a path": (index_of(listed=[[_RAW, "/etc/passwd", 0]]), "no place"),
    "a place of the agent's": (index_of(listed=[[_RAW, "profiles/job", 0]]), "no place"),
    "a place that is no text": (index_of(listed=[[_RAW, 7, 0]]), "no place"),
    "a day before all days": (index_of(listed=[[_RAW, "", -1]]), "no day"),
    "a day that is a truth": (index_of(listed=[[_RAW, "", True]]), "no day"),
    "a negative size": (index_of([_RAW, "", 0, -1, _HASH]), "no size"),
    "a size that is a truth": (index_of([_RAW, "", 0, True, _HASH]), "no size"),
    "an object beyond all bounds": (index_of([_RAW, "", 0, 1 << 60, _HASH]), "no size"),
    "a profile that leads elsewhere": (index_of(profiles=[["../p", 0, _HASH]]), "no profile is called"),
    "a hidden profile": (index_of(profiles=[[".p", 0, _HASH]]), "no profile is called"),
    "a profile twice": (index_of(profiles=[["p", 0, _HASH], ["p", 0, _HASH]]), "twice"),
    "a later format": ([2, [], [], []], "format 2"),
    "another field": ([*index_of(), 1], "another length"),
    "more than the file has": (index_of([_RAW, "", 0, 9, _HASH]), "its index states"),
}


@pytest.mark.parametrize("what", _BAD)
def test_an_index_is_refused_that_has(what: str) -> None:
    index, why = _BAD[what]
    assert why in refused(made(index))


def test_an_index_that_claims_more_than_the_file_is_not_waited_for() -> None:
    assert "huge index" in refused(MAGIC + b"x" + (1 << 62).to_bytes(8, "big"))


def test_bytes_that_no_index_states_are_refused(sample: bytes) -> None:
    assert refused(sample + b"\0")
    assert "its index states" in refused(MAGIC + b"\0" + sample[len(MAGIC) :])


def test_a_signed_bundle_with_any_other_index_is_refused(tmp_path: Path) -> None:
    content = exported(filled(tmp_path / "here", OURS, count=1), tmp_path / "b.kcb").read_bytes()
    size = int.from_bytes(content[-8:], "big")
    blobs, sealed = content[len(MAGIC) : -8 - size], content[-8 - size : -8]
    plain, _ = split(sealed)
    assert "not signed" in refused(made(plain, blobs), trust(OURS))
    other = trust(OURS).seal("manifest", plain)
    assert "its signature is not" in refused(made(other, blobs), trust(OURS))
    assert refused(made(trust(OURS).seal(PACK, plain), blobs[::-1]), trust(OURS))


def test_an_artifact_of_another_key_in_its_place_is_refused() -> None:
    manifest = manifest_of(key=KEYS[0])
    found = StoredObject(manifest, manifest.encode(), payload_of(manifest, FILES))
    artifact = b"".join(found.pieces())
    assert "another key's" in refused(made(index_of(entry(KEYS[1].digest, artifact, found.encoded)), artifact))


def test_a_payload_that_unpacks_to_a_thousand_times_its_size_is_refused_unread() -> None:
    entries = manifest_of({"zeros": b""}, KEYS[0])
    huge = replace(entries, files=(entries.files[0]._replace(size=8 << 30),))
    payload = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    found = StoredObject(huge, huge.encode(), payload)
    artifact = b"".join(found.pieces())
    why = refused(made(index_of(entry(KEYS[0].digest, artifact, found.encoded)), artifact))
    assert "would unpack to 8589934592" in why


# --- the commands ---

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def kcoord(sandbox: Sandbox) -> Run:
    return functools.partial(sandbox.run_kcoord, "-c", "from kcoord.cli import main; main()")


def test_a_profile_moves_from_one_store_to_another_with_what_its_jobs_needed(
    sandbox: Sandbox, kcoord: Run, tmp_path: Path
) -> None:
    here = filled(tmp_path / "here", OURS)
    save_part(here.root / "v2" / "profiles" / "p", [recipe(1), recipe(2)], trust=here.trust)
    used = [Use(DIGESTS[2], "triton/A", today() - 3), *uses(DIGESTS[:1])]
    write_pack(here, "p", used)
    there = tmp_path / "there"
    out = tmp_path / "p.kcb"
    done = kcoord("export", "p", str(out), KCOORD_STORE=str(here.root), KCOORD_SIGNING_KEY=OURS)
    assert done.returncode == 0, done.stderr
    assert "2 artifacts and 1 profiles" in done.stdout
    given = {"KCOORD_STORE": str(there), "KCOORD_SIGNING_KEY": OURS}
    assert kcoord("import", str(out), **given).returncode == 0
    again = kcoord("import", "--json", str(out), **given)
    assert json.loads(again.stdout) == {"published": 0, "kept": 2, "profiles": ["p"]}
    assert set(Store(there).digests()) == {DIGESTS[0], DIGESTS[2]}
    found = {r.digest for r in parts(there / "v2" / "profiles" / "p", Notices(), trust(OURS))}
    assert found == {recipe(1).digest, recipe(2).digest}
    (path,) = packs_of(there, "p")
    listed = listed_in(Store(there, trust(OURS)), path)
    assert listed == {use.digest: replace(use, day=today()) for use in used}, "so the next job starts warm there"


def test_all_that_is_exported_has_profiles_too_of_which_only_packs_are_known(kcoord: Run, tmp_path: Path) -> None:
    here, out = filled(tmp_path / "here", OURS), tmp_path / "all.kcb"
    packs.pack(here, DIGESTS[2:3], "generic")
    given = {"KCOORD_STORE": str(here.root), "KCOORD_SIGNING_KEY": OURS}
    done = kcoord("export", "--all", str(out), "--json", **given)
    assert json.loads(done.stdout)["profiles"] == ["generic"], done.stderr


def test_a_profile_that_cannot_be_read_is_left_out_of_all_and_named(kcoord: Run, tmp_path: Path) -> None:
    """So that what a key signed can be moved before the key goes, whatever else is in the store."""
    here, out = filled(tmp_path / "here", OURS), tmp_path / "all.kcb"
    profiles = here.root / "v2" / "profiles"
    save_part(profiles / "mine", [recipe(1)], trust=trust(OURS))
    save_part(profiles / "unsigned", [recipe(2)])
    given = {"KCOORD_STORE": str(here.root), "KCOORD_SIGNING_KEY": OURS}
    done = kcoord("export", "--all", str(out), "--json", **given)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["artifacts"], told["profiles"], list(told["left_out"])) == (4, ["mine"], ["profile unsigned"])
    assert "left out: profile unsigned: " in kcoord("export", "--all", str(out), **given).stderr
    assert kcoord("export", "unsigned", str(out), **given).returncode == 1, "it was asked for by name"


def test_a_profile_that_nobody_vouches_for_is_not_signed_by_importing_it(kcoord: Run, tmp_path: Path) -> None:
    out, root = tmp_path / "p.kcb", tmp_path / "there"
    strange = encode_profile([recipe(1), recipe(2)], DIGESTS)
    export(opened(tmp_path / "here"), (), {"p": strange}, out)
    there = root / "v2" / "profiles" / "p"
    save_part(there, [recipe(1), recipe(2)], trust=trust(OURS))
    given = {"KCOORD_STORE": str(root), "KCOORD_SIGNING_KEY": OURS, "KCOORD_TRUST": "off"}
    assert kcoord("import", str(out), **given).returncode == 0
    ours = {r.digest for r in parts(there, Notices(), trust(OURS))}
    assert ours == {recipe(1).digest, recipe(2).digest}, "what is signed keeps its signature"
    export(opened(tmp_path / "here"), (), {"p": encode_profile([recipe(3)], DIGESTS)}, out)
    assert kcoord("import", str(out), **given).returncode == 0
    assert {r.digest for r in parts(there, Notices(), trust(OURS))} == ours
    assert recipe(3).digest in {r.digest for r in parts(there, Notices())}
    assert packs_of(root, "p") == []


def test_verify_names_each_bad_artifact_and_exits_with_1(kcoord: Run, tmp_path: Path) -> None:
    store = filled(tmp_path / "here", OURS)
    given = {"KCOORD_STORE": str(store.root), "KCOORD_SIGNING_KEY": OURS}
    done = kcoord("verify", **given)
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 artifacts verified, 0 bad" in done.stdout
    store.home(DIGESTS[0]).write_bytes(b"torn")
    unsigned(store.home(DIGESTS[1]))
    done = kcoord("verify", "--json", **given)
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert set(told["bad"]) == {str(store.home(d)) for d in DIGESTS[:2]}
    assert told["whole"] == 2
    told = json.loads(kcoord("verify", "--json", **given, KCOORD_TRUST="off").stdout)
    assert set(told["bad"]) == {str(store.home(DIGESTS[0]))}
    assert sorted(store.digests()) == DIGESTS, "nothing was moved"


def test_verify_looks_at_this_nodes_own_copies_too(sandbox: Sandbox, kcoord: Run) -> None:
    for key in KEYS[:2]:
        home = sandbox.local / "objects" / key.digest[:2] / key.digest
        home.parent.mkdir(parents=True, exist_ok=True)
        local.install(manifest_of(key=key), FILES, home)
    assert "2 artifacts verified, 0 bad" in kcoord("verify", "--local").stdout
    (home / "a.cubin").write_bytes(b"other")
    done = kcoord("verify", "--local")
    assert done.returncode == 1
    assert str(home) in done.stderr


def test_an_import_that_is_interrupted_leaves_nothing_half_done(sandbox: Sandbox, tmp_path: Path) -> None:
    bundle, root = exported(filled(tmp_path / "here"), tmp_path / "b.kcb"), tmp_path / "there"
    stuck = "import time, kcoord.files.link as s; s.beneath.link = lambda *staged: time.sleep(600)"
    code = f"{stuck}; from kcoord.cli import main; main()"
    process = sandbox.start("-c", code, "import", str(bundle), KCOORD_STORE=str(root))
    eventually(lambda: list(root.glob("v2/staging/*.part")) or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert list((root / "v2" / "staging").iterdir()) == []
    assert imported(bundle, Store(root)) == (4, 0)


@pytest.mark.parametrize("command", ["verify --local", "ls"])
def test_a_node_whose_copies_cannot_be_listed_is_not_said_to_hold_none(
    kcoord: Run, tmp_path: Path, command: str
) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "objects").write_text("no directory")
    done = kcoord(*command.split(), "--local-dir", str(tmp_path / "local"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "part of its path is a file" in done.stderr
