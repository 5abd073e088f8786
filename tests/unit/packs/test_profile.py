"""Profiles: what is recorded comes back as it was, from many writers, and nothing that lies on a disk is believed."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.artifacts.signing import Trust, parse_key
from kcoord.artifacts.store import Store
from kcoord.errors import KcoordError, StoreError
from kcoord.files.atomic import staging_name
from kcoord.packs import recipe as recipe_module
from kcoord.packs import recipe_files as profile_module
from kcoord.packs.recipe import LARGEST_RECIPE, Known, Recipe, merge
from kcoord.packs.recipe_files import (
    MOST_PARTS,
    decode_part,
    encode_part,
    load_profile,
    profile_names,
    save_part,
)
from kcoord.protocol import frames
from kcoord.rank.coordinator import Coordinator
from kcoord.replay.profile_access import readable
from kcoord.retention.tidying import tidy_parts
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from tests.support.agents import Node, in_thread, until
from tests.support.artifacts import DAY, older
from tests.support.cluster import start_agent
from tests.support.profiles import recipe
from tests.support.sandbox import Sandbox

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
_RECORD = """
from kcoord.rank.coordinator import Coordinator
from kcoord.packs.recipe import Recipe
coordinator = Coordinator(Settings.from_environ())
for n in {numbers}:
    coordinator.record(Recipe("python", "train", "build", (n,), "", float(n), n))
coordinator._telemetry.deliver()
say("delivered")
listen()
"""


def through_the_wire(made: Recipe) -> Recipe:
    return Recipe.from_wire(frames.decode_body(frames.encode_frame(made.to_wire())[frames.HEADER_BYTES :]))


def exactly(value: Any) -> Any:
    """`value` with its types spelled out: True is not 1, a tuple no list, and NaN is NaN."""
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [exactly(v) for v in value]
    if isinstance(value, dict):
        return [(k, exactly(v)) for k, v in value.items()]
    return type(value).__name__, repr(value)


# A recipe.


@given(PLAIN)
def test_a_call_comes_back_as_it_was(call: Any) -> None:
    made = Recipe("triton", "train", "kernel", call, "", 1.5, 3)
    back = through_the_wire(made)
    assert exactly(back.call) == exactly(call)
    assert back.digest == made.digest
    assert replace(back, call=None) == replace(made, call=None)


def test_text_that_is_no_unicode_comes_back() -> None:
    assert through_the_wire(recipe(call="\udc80")).call == "\udc80"


def test_what_was_compiled_makes_the_digest_and_not_how_long_it_took() -> None:
    made = recipe(1, seconds=1, order=1)
    assert made.digest == replace(made, seconds=9.0, order=9).digest
    others = [replace(made, **{name: "other"}) for name in ("backend", "module", "qualname")]
    calls = [
        recipe(call=call) for call in ((1,), [1], (True,), (1.0,), ("1",), (b"1",), (None,), {"1": 1}, (1, 1), ((1,),))
    ]
    different = [replace(made, target="hip:gfx942"), *others, *calls[1:]]
    assert len({r.digest for r in [made, *different]}) == 1 + len(different)
    assert recipe(call={"a": 1, "b": 2}).digest == recipe(call={"b": 2, "a": 1}).digest


class Colour(enum.IntEnum):
    RED = 1


class Real(float):
    """As numpy's float64 is one."""


@pytest.mark.parametrize(
    "call",
    [
        object(),
        {1, 2},
        {1: "one"},
        [Colour.RED],
        Real(1.5),
        1j,
        bytearray(b"x"),
        b"x" * LARGEST_RECIPE,
        1 << (8 * LARGEST_RECIPE),
    ],
    ids=lambda call: type(call).__name__,
)
def test_what_is_no_plain_value_or_too_large_makes_no_recipe(call: Any) -> None:
    with pytest.raises(ValueError, match="recipe"):
        recipe(call=call)


def test_a_value_that_holds_itself_makes_no_recipe() -> None:
    call: list[Any] = []
    call.append(call)
    with pytest.raises(ValueError, match="nested"):
        recipe(call=call)


@pytest.mark.parametrize(
    "field",
    [
        {"backend": "os; rm"}, {"backend": ""}, {"module": "../x"}, {"module": "a..b"}, {"module": "m" * 2000}, {"module": b"m"},
        {"qualname": "f.<locals>.g"}, {"qualname": "f()"}, {"qualname": None}, {"target": "cuda"}, {"target": 90},
        {"seconds": -1.0}, {"seconds": float("nan")}, {"seconds": float("inf")}, {"seconds": True}, {"seconds": "1"},
        {"day": -1}, {"day": 1.0}, {"day": True}, {"day": 1 << 32},
        {"order": -1}, {"order": 1.0}, {"order": False}, {"order": 1 << 64},
        {"call": None}, {"call": (1,)}, {"call": b""}, {"call": b"\xc1"}, {"call": b"\x90"}, {"call": b"\x91\x02"},
        {"call": b"\x91\x91" * 2000}, {"call": b"\xdd\xff\xff\xff\xff" * 900}, {"call": b"\xd6\xff\0\0\0\1"},
        {"call": b"\xd4\x07x"}, {"call": b"\x81\xc4\x01a\x01"}, {"call": b"\x92\x00" * 40 + b"\x00"}, {"call": b"\x01\x01"},
        {"call": b"\xc4" + bytes(LARGEST_RECIPE)}, {"more": 1},
    ],
    ids=lambda field: str(field)[:40],
)  # fmt: skip
def test_a_wire_form_with_a_wrong_field_is_refused(field: dict[str, Any]) -> None:
    known = Known()
    Recipe.from_wire(recipe().to_wire(), known)
    for remembered in (None, known):  # also if all the rest of it was read before
        with pytest.raises(ValueError):
            Recipe.from_wire(recipe().to_wire() | field, remembered)


def test_recipes_that_are_read_together_hold_a_bounded_number_of_values() -> None:
    """An empty list is a few bytes of a file, and dozens in memory; each call is within its own bound."""
    lists, known = [[]] * 10_000, Known(room=800_000)
    sizes = {n: decode_part(encode_part(merge([recipe(call=[n, *lists])])), Known()) for n in range(3)}
    for n in range(2):
        assert decode_part(encode_part(merge([recipe(call=[n, *lists])])), known) == sizes[n]
    assert decode_part(encode_part(merge(sizes[0])), known) == sizes[0], "it comes again, and takes no more"
    for _ in range(2):
        with pytest.raises(ValueError, match="more than a profile may"):
            decode_part(encode_part(merge(sizes[2])), known)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_call_or_a_value_error(call: bytes) -> None:
    with contextlib.suppress(ValueError):
        made = Recipe.from_wire(recipe().to_wire() | {"call": call})
        assert exactly(through_the_wire(made).call) == exactly(made.call)


# Parts of a profile.


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_environ({}, local_dir=str(tmp_path / "local"), store=str(tmp_path / "store"))


@pytest.fixture
def store(settings: Settings) -> Store:
    made = Store(settings.store_root or Path())
    made.open()
    return made


def home(settings: Settings, name: str = "p") -> Path:
    assert settings.store is not None
    return settings.store / "v2" / "profiles" / name


def test_a_profile_is_sorted_longest_first_however_its_parts_were_written(settings: Settings) -> None:
    recipes = [recipe(n, seconds=n // 3, order=n % 2) for n in range(12)]
    expected = sorted(recipes, key=lambda r: (-r.seconds, r.order, r.digest))
    for shuffle in range(10):
        random.Random(shuffle).shuffle(recipes)
        name = f"p{shuffle}"
        save_part(home(settings, name), recipes[:8])
        save_part(home(settings, name), recipes[4:])
        assert load_profile(settings, name) == expected


def test_of_a_recipe_in_several_parts_the_longest_compile_and_the_first_request_count(settings: Settings) -> None:
    save_part(home(settings), [recipe(1, seconds=2.0, order=7), recipe(2)])
    save_part(home(settings), [recipe(1, seconds=9.0, order=8), recipe(3)])
    save_part(home(settings), [recipe(1, seconds=1.0, order=5), recipe(4)])
    assert load_profile(settings, "p")[0] == recipe(1, seconds=9.0, order=5)


def test_parts_of_the_same_recipes_are_one_file(settings: Settings) -> None:
    one = save_part(home(settings), [recipe(1), recipe(2)])
    assert save_part(home(settings), [recipe(2, seconds=5.0), recipe(1), recipe(1)]) == one
    assert list(home(settings).iterdir()) == [one]


def test_a_writer_replaces_its_own_earlier_part_and_leaves_those_of_others(settings: Settings) -> None:
    others, first = save_part(home(settings), [recipe(9)]), save_part(home(settings), [recipe(1)])
    second = save_part(home(settings), [recipe(1), recipe(2)], earlier=first)
    assert sorted(home(settings).iterdir()) == sorted([others, second])
    assert save_part(home(settings), [recipe(1), recipe(2)], earlier=second) == second
    assert second.exists()


def test_without_a_store_profiles_are_in_the_local_directory(settings: Settings) -> None:
    alone = replace(settings, store=None)
    save_part(settings.local_dir / "profiles" / "p", [recipe(1)])
    assert load_profile(alone, "p") == [recipe(1)]


def test_a_part_that_is_replaced_while_the_profile_is_read_is_read_all_the_same(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = settings.local_dir / "profiles" / "job"
    first = save_part(directory, [recipe("a")], local_dir=settings.local_dir)
    listing = profile_module.newest_parts
    replaced: list[Path] = []

    def then_replaced(there: Path) -> list[Path]:
        listed = listing(there)
        if not replaced:
            replaced.append(
                save_part(directory, [recipe("a"), recipe("b")], earlier=first, local_dir=settings.local_dir)
            )
        return listed

    monkeypatch.setattr(profile_module, "newest_parts", then_replaced)
    found = profile_module.parts(directory, Notices(), local_dir=settings.local_dir)
    assert replaced != [first]
    assert len(found) == 2


def test_what_only_this_node_has_is_part_of_the_profile(settings: Settings) -> None:
    save_part(home(settings), [recipe(1, seconds=2.0)])
    save_part(settings.local_dir / "profiles" / "p", [recipe(2, seconds=1.0)])
    assert load_profile(settings, "p") == [recipe(1, seconds=2.0), recipe(2, seconds=1.0)]


def test_a_profile_that_is_not_there_is_an_error_that_names_those_there_are(settings: Settings) -> None:
    with pytest.raises(KcoordError, match=r"no profile 'p': there are none yet \(KCOORD_PROFILE"):
        load_profile(settings, "p")
    for name in ("llama", "gpt-2"):
        save_part(home(settings, name), [recipe()])
    (home(settings) / ".hidden").mkdir(parents=True)
    assert profile_names(settings) == ["gpt-2", "llama", "p"]
    for name in ("q", "../objects", ""):
        with pytest.raises(KcoordError, match="there are gpt-2, llama, p"):
            load_profile(settings, name)
    with pytest.raises(KcoordError, match="no part that can be read"):
        load_profile(settings, "p")


def test_torn_and_foreign_parts_are_skipped_with_a_notice(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = save_part(home(settings), [recipe(1)])
    content = whole.read_bytes()
    wrong = [
        msgpack.packb({"no": "list"}),
        msgpack.packb([recipe(2).to_wire(), {"backend": "x"}]),
        b"\xc1",
        b"",
        b"\x93\x01",
    ]
    bodies = [profile_module.HEAD + hashlib.sha256(b).digest() + b for b in wrong]
    torn = [content[:-1], content[:20], b"", content[:-1] + b"\xff", *bodies, content + bytes(2000)]
    monkeypatch.setattr(profile_module, "LARGEST_PART", len(content) + 1000)
    for number, bad in enumerate(torn):
        (home(settings) / f"{number}.recipes").write_bytes(bad)
    (home(settings) / "a-directory.recipes").mkdir()
    (home(settings) / "README").write_text("not ours")
    notices = Notices()
    assert load_profile(settings, "p", notices) == [recipe(1)]
    assert len(notices.since(0)[0]) == len(torn) + 1


def test_a_recipe_that_many_parts_hold_is_checked_once(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank reads all parts as a job begins: of 10,000 recipes in 17 parts that took half a minute."""
    for n in range(20):
        save_part(home(settings), [*(recipe(m, seconds=m + n, order=100 - n) for m in range(30)), recipe(100 + n)])
    unpacked, unpack = [], recipe_module._unpacked

    def counting(value: Any, depth: int) -> Any:
        unpacked.append(value)
        return unpack(value, depth)

    monkeypatch.setattr(recipe_module, "_unpacked", counting)
    found = load_profile(settings, "p")
    assert len(found) == 50
    assert len(unpacked) == 2 * 50, "a call, and the number in it"
    assert [r for r in found if r.call[0] < 100] == [recipe(m, m + 19, 81) for m in reversed(range(30))]
    assert all(replace(r) == r and replace(r).digest == r.digest for r in found)


def test_the_newest_parts_are_read_and_a_pass_removes_the_others_after_a_day(store: Store, settings: Settings) -> None:
    made = [older(save_part(home(settings), [recipe(n)]), n * 10.0) for n in range(MOST_PARTS + 3)]
    assert {r.call[0] for r in load_profile(settings, "p")} == set(range(MOST_PARTS))
    assert tidy_parts(store.root) == 0, "their writers may go on"
    for part in made:
        older(part, 2 * DAY)
    left = home(settings) / f".{staging_name()}"
    left.write_bytes(b"half a part, of a writer that lives")
    assert tidy_parts(store.root) == 3
    assert sorted(home(settings).iterdir()) == sorted([left, *made[:MOST_PARTS]])


def test_a_disk_that_refuses_is_a_store_error_and_leaves_nothing(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StoreError, match="file"):
        save_part(tmp_path / "file" / "p", [recipe()])
    part = save_part(home(settings), [recipe()])
    part.unlink()
    (part / "in the way").mkdir(parents=True)
    with pytest.raises(StoreError):
        save_part(home(settings), [recipe()])
    assert list(home(settings).iterdir()) == [part]


def test_a_profile_is_bounded(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    monkeypatch.setattr(recipe_module, "MOST_RECIPES", 3)
    assert [r.call for r in merge(recipe(n) for n in (1, 2, 1, 3, 4)).values()] == [(1,), (2,), (3,)]
    monkeypatch.setattr(profile_module, "LARGEST_PART", 100)
    with pytest.raises(StoreError, match="too large"):
        save_part(home(settings), [recipe(1)])


# From ranks through agents.


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(store=str(tmp_path / "store"), profile="p") as node:
        node.start()
        yield node


def numbers(settings: Settings, name: str = "p") -> set[int]:
    try:
        return {r.call[0] for r in load_profile(settings, name)}
    except KcoordError:  # there is none yet
        return set()


def parts_of(node: Node) -> list[str]:
    return sorted(p.name for p in home(node.settings).iterdir() if not p.name.startswith("."))


def record(node: Node, *ns: int) -> None:
    coordinator = Coordinator(node.settings)
    for n in ns:
        coordinator.record(recipe(n))
    coordinator.close()


def test_what_the_ranks_record_is_one_part_in_the_store(node: Node) -> None:
    ranks = [node.rank(_RECORD.format(numbers=list(range(r, 5 + r)))) for r in range(3)]
    for rank in ranks:
        rank.expect("delivered")
    until(lambda: numbers(node.settings) == set(range(7)))
    until(lambda: len(parts_of(node)) == 1)
    assert not (node.directory / "profiles").exists()


def test_two_agents_write_one_profile(node: Node) -> None:
    with Node(store=str(node.settings.store), profile="p") as other:
        other.start()
        record(node, 1, 2)
        record(other, 2, 3)
        until(lambda: numbers(node.settings) == {1, 2, 3})
        assert load_profile(node.settings, "p") == load_profile(other.settings, "p")
        record(node, 3)
        record(other, 1)
        until(lambda: len(parts_of(node)) == 1)
    assert numbers(node.settings) == {1, 2, 3}


def test_an_agent_whose_store_refuses_keeps_the_profile_on_its_node_and_says_so_once(node: Node) -> None:
    node.status()  # it has opened its store
    home(node.settings).parent.write_text("no directory")
    for n in range(3):
        record(node, n)
        here = replace(node.settings, store=None)
        until(lambda n=n, here=here: numbers(here) == set(range(n + 1)))
    told = [line for line in node.status()["notices"] if "profile" in line]
    assert len(told) == 1
    assert "a part of its path is a file" in told[0]
    home(node.settings).parent.unlink()
    record(node, 3)
    until(lambda: home(node.settings).exists() and numbers(node.settings) == {0, 1, 2, 3})
    shutil.rmtree(node.directory / "profiles")
    assert numbers(node.settings) == {0, 1, 2, 3}, "the store has it all once it can be written"


def test_what_ranks_kept_without_an_agent_goes_to_the_store_with_the_next_part(node: Node) -> None:
    save_part(node.directory / "profiles" / "p", [recipe(8)])
    record(node, 1)
    until(lambda: home(node.settings).exists() and len(parts_of(node)) == 1)
    shutil.rmtree(node.directory / "profiles")
    assert numbers(node.settings) == {1, 8}


@pytest.mark.parametrize(
    "frame",
    [
        {"profile": "../p", "recipes": []},
        {"profile": "p"},
        {"profile": 1, "recipes": []},
        {"profile": "p", "recipes": [recipe(1).to_wire(), {"backend": "x"}]},
        {"profile": "p", "recipes": [recipe(1).to_wire()] * 257},
    ],
)
def test_a_malformed_record_is_refused_whole(node: Node, frame: dict[str, Any]) -> None:
    with node.wire() as wire:
        wire.hello()
        wire.send({"id": 7, "op": "record", **frame})
        wire.assert_closed()
    record(node, 2)
    until(lambda: numbers(node.settings) == {2})


def test_more_than_fits_into_a_frame_is_delivered_in_several(node: Node) -> None:
    coordinator = Coordinator(node.settings)
    for n in range(100):
        coordinator.record(recipe(call=(n, b"x" * 60_000)))
    for n in range(100, 700):
        coordinator.record(recipe(n))
    assert coordinator._telemetry.deliver()
    coordinator.close()
    until(lambda: numbers(node.settings) == set(range(700)))


_SLOW_STORE = """
import pathlib, time
import kcoord.packs.recipe_files as files
from kcoord.agent.chores.profiles import Profiles
here, read, bring = pathlib.Path({here!r}), files.read_plain, Profiles.bring

def slow(path, most):
    (here / "reads").open("a").write("x")
    while not (here / "let-go").exists():
        time.sleep(0.01)
    return read(path, most)

async def told(*arguments):
    answer = await bring(*arguments)
    (here / "answered").touch()
    return answer

files.read_plain, Profiles.bring = slow, told
"""


def test_ranks_wait_for_a_profile_that_their_agent_has_to_verify_in_a_slow_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads it once for all of them. Else the job would begin without a warm-up, and nobody would hear of it."""
    key = "main:" + "ab" * 32
    save_part(
        tmp_path / "store" / "v2" / "profiles" / "p",
        [recipe(1)],
        trust=Trust("require", {"main": parse_key("ab" * 32)}),
    )
    with Node(store=str(tmp_path / "store"), signing_key=key, agent_timeout="2") as node:
        start_agent(node, _SLOW_STORE.format(here=str(tmp_path)), {"KCOORD_SIGNING_KEY": key})
        ranks = replace(node.settings, signing_key=None, trust="require", socket=node.path)
        found = [in_thread(lambda: load_profile(readable(ranks, "p"), "p")) for _ in range(4)]
        until((tmp_path / "answered").exists)
        (tmp_path / "let-go").touch()
        assert [future.result(30) for future in found] == [[recipe(1)]] * 4
        assert (tmp_path / "reads").read_text() == "x"
        (tmp_path / "let-go").unlink()
        monkeypatch.setattr("kcoord.replay.profile_access._PATIENCE", 0.1)
        with pytest.raises(StoreError, match=r"within 0\.1 s: does the store hang"):
            readable(ranks, "p")
        (tmp_path / "let-go").touch()


# A rank.


@pytest.fixture
def alone(sandbox: Sandbox) -> Iterator[Coordinator]:
    """A rank that has no agent and starts none."""
    made = Coordinator(Settings.from_environ({}, local_dir=str(sandbox.local), spawn="0", profile="p"))
    yield made
    made.close()


def test_a_rank_without_an_agent_writes_a_part_on_its_node(alone: Coordinator) -> None:
    alone.record(recipe(1))
    alone.record(recipe(1, seconds=7.0))
    alone.close()
    assert load_profile(alone.settings, "p") == [recipe(1)]
    alone.record(recipe(2))
    alone.close()
    assert numbers(alone.settings) == {1, 2}


def test_nothing_is_recorded_unless_a_profile_is_named(alone: Coordinator) -> None:
    for settings in (replace(alone.settings, profile=None), replace(alone.settings, disable=True)):
        other = Coordinator(settings)
        other.record(recipe(1))
        other.close()
    assert profile_names(alone.settings) == []


def test_a_disk_that_refuses_a_rank_is_told_once_and_harms_nothing(alone: Coordinator) -> None:
    alone.record(recipe(1))
    (alone.settings.local_dir / "profiles").write_text("no directory")
    alone.close()
    alone.close()
    assert len([n for n in alone.notices.since(0)[0] if "profile" in n]) == 1
    (alone.settings.local_dir / "profiles").unlink()


def test_a_forked_child_leaves_its_parents_recipes_to_the_parent(alone: Coordinator) -> None:
    alone.record(recipe(1))
    if (child := os.fork()) == 0:
        alone.record(recipe(2))
        alone.close()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert numbers(alone.settings) == {2}
    alone.close()
    assert numbers(alone.settings) == {1, 2}
