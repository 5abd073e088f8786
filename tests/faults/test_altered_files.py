"""Files that a writer of the store has altered in any way: what is loaded is what was signed, and no reader fails otherwise."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.artifacts.signing import MANIFEST, OFF, PROFILE
from kcoord.artifacts.store import Store
from kcoord.backends.triton import choice
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.packs.pack_files import packs_of
from kcoord.packs.recipe_files import parts, save_part
from kcoord.packs.writing import write_pack
from kcoord.retention.pins import kept_by_pins, pin
from kcoord.telemetry.events import Notices
from kcoord.testing.stores import FILES, KEY, manifest_of
from tests.support.fuzzing import changed, fuzz, mutants
from tests.support.objects import parts_of, put_together
from tests.support.packs import uses
from tests.support.profiles import recipe
from tests.support.signing import OURS, opened, trust

OURS_ALONE = trust(OURS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


def altered(data: st.DataObject, sealed: bytes, kind: str) -> bytes:
    """A signed file with another content under the old signature, with another envelope, or with none."""
    prefix = b"kcoord-signed-1\n"
    key_id, mac, content = msgpack.unpackb(sealed[len(prefix) :])
    document = msgpack.unpackb(content) if kind == MANIFEST else content
    other = data.draw(changed(document) if kind == MANIFEST else mutants(content))
    return bytes(
        data.draw(
            st.sampled_from([other, prefix + msgpack.packb([key_id, mac, other])])
            | changed([key_id, mac, content]).map(prefix.__add__)
            | mutants(sealed)
        )
    )


@given(data=st.data())
@fuzz(60)
def test_an_artifact_that_was_altered_is_refused_or_is_the_one_that_was_signed(root: Path, data: Any) -> None:
    store = opened(root / "artifacts", OURS)
    if not store.home(KEY.digest).exists():
        store.publish(manifest_of(), FILES)
    home = store.home(KEY.digest)
    before, (encoded, payload) = home.read_bytes(), parts_of(home)
    kind = data.draw(st.sampled_from(["manifest", "payload", "any"]))
    if kind == "manifest":
        home.write_bytes(put_together(altered(data, encoded, MANIFEST), payload))
    elif kind == "payload":
        home.write_bytes(put_together(encoded, data.draw(mutants(payload))))
    else:
        home.write_bytes(data.draw(mutants(before)))
    for judge in (OURS_ALONE, trust(OURS, policy="off")):
        with contextlib.suppress(ArtifactInvalid):
            found = Store(store.root, judge).object(KEY.digest)
            assert found is None or not judge.required or (found.encoded, found.contents()) == (encoded, FILES)
        with contextlib.suppress(ArtifactInvalid):
            stated = Store(store.root, judge).stated(KEY.digest)
            assert stated is None or stated[0].key.digest == KEY.digest
    home.write_bytes(before)


@given(data=st.data())
@fuzz(60)
def test_a_signed_part_of_a_profile_that_was_altered_is_skipped(root: Path, data: Any) -> None:
    directory = root / "profile"
    path = save_part(directory, [recipe(1)], trust=OURS_ALONE)
    path.write_bytes(altered(data, path.read_bytes(), PROFILE))
    assert list(parts(directory, Notices(), OURS_ALONE)) in ([], [recipe(1)])
    path.unlink()


@given(data=st.data())
@fuzz(80)
def test_a_choice_that_was_altered_is_none_or_one_of_text(data: Any) -> None:
    valid = msgpack.unpackb(choice.pack("ab" * 32, "BLOCK: 64", [1.0, 2.0]))
    altered = data.draw(changed(valid))
    assert isinstance(choice.chosen_in(altered), str)
    assert isinstance(choice.timings_in(altered, 2), list | None)


@given(data=st.data())
@fuzz(40)
def test_files_of_retention_that_were_altered_are_none_or_an_error_of_the_store(root: Path, data: Any) -> None:
    store = opened(root / "retention").root
    pin(store, "p")
    write_pack(opened(store), "p", uses(["ab" * 32]))
    files = [store / "v2" / "pins" / "p.pin", *packs_of(store, "p")]
    path = data.draw(st.sampled_from(sorted(files)))
    path.write_bytes(data.draw(mutants(path.read_bytes())))
    with contextlib.suppress(StoreError):
        kept_by_pins(store, OFF)
    path.unlink()
