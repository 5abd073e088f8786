"""Keys: equal exactly when values and types are, in every process, and explainable when they differ."""

from __future__ import annotations

import collections
import enum
import os
import shutil
import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.errors import KeyFactorError
from kcoord.keys import CacheKey, DeviceKey, Factor, GPUTarget, Scope
from kcoord.keys.cache_key import make_factor

_ROOT = Path(__file__).parents[3]
NAN = float("nan")


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Shade(enum.Enum):
    RED = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2
    EXECUTE = 4


class Bits(enum.IntFlag):
    LOW = 1


class Level(enum.IntEnum):
    ONE = 1


@dataclass(frozen=True)
class Tile:
    m: int
    n: int
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class OtherTile:
    m: int
    n: int
    names: list[str] = field(default_factory=list)


class Point(NamedTuple):
    x: int
    y: int


class Signed:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __cache_signature__(self) -> Any:
        return self.value


class OtherSigned(Signed):
    pass


class Opaque:
    pass


def digest(**factors: Any) -> str:
    return CacheKey.of("test", "kernel", **factors).digest


DIFFERENT: list[Any] = [
    None, False, True, 0, 1, -1, 0.0, -0.0, 1.0, NAN, float("inf"), float("-inf"), 1e-320, 0j, 1j, complex(1, -0.0),
    "", "1", "None", "True", b"", b"1", "é", "e\N{COMBINING ACUTE ACCENT}", "\ud800",
    [], (), set(), {}, [1], (1,), {1}, {1: 1}, [[]], [()], [1, 2], [12], ["1", "2"], ["12"], ["", "12"], [[1], 2],
    [[1, 2]], {"a": 1}, {"a": 1.0}, {"a": "1"}, {1: "a"}, {"a": {"b": 1}}, {"a": {"b": 2}}, {("a", "b"): 1},
    {"ab": ""}, {"a": "b"}, {"": "ab"}, {"a": 1, "b": 2}, {"a": 2, "b": 1}, {1, 2}, {(1, 2)}, {True, 2},
    Colour.RED, Colour.BLUE, Shade.RED, Level.ONE, Access.READ, Access.READ | Access.WRITE, Access.READ | Access.EXECUTE,
    Access(0), Bits(8), Bits(16), Bits.LOW,
    Tile(1, 2), Tile(2, 1), Tile(1, 2, ["x"]), OtherTile(1, 2), Point(1, 2), Point(2, 1), (1, 2),
    Signed(1), Signed("1"), Signed([1]), OtherSigned(1), Signed(Signed(1)), 10**5000, 10**5000 + 1, 2**63, 2**64,
]  # fmt: skip


def test_no_two_different_values_share_a_digest() -> None:
    found: dict[str, Any] = {}
    for value in DIFFERENT:
        one = digest(factor=value)
        assert one not in found, f"{value!r} and {found[one]!r} collide"
        found[one] = value


def test_a_value_has_one_digest_however_often_and_wherever_it_is_made() -> None:
    for value in DIFFERENT:
        assert digest(factor=value) == digest(factor=value)
    assert digest(f=float("nan")) == digest(f=-float("nan")) == digest(f=float("inf") - float("inf"))
    assert digest(f=complex(float("nan"), 1)) == digest(f=complex(-float("nan"), 1))
    assert digest(f="a" * 3) == digest(f="aaa")


def test_the_order_of_factors_does_not_matter() -> None:
    assert digest(a=1, b=2) == digest(b=2, a=1)
    assert digest(a=1, b=2) != digest(a=2, b=1)


def test_standard_mappings_are_keyed_by_their_entries() -> None:
    plain = {"a": 1}
    for mapping in (collections.OrderedDict(plain), collections.Counter(plain), types.MappingProxyType(plain)):
        assert digest(f=mapping) == digest(f=plain)


def test_name_and_backend_and_factor_names_are_part_of_the_key() -> None:
    keys = [
        CacheKey.of("b", "n", f=1), CacheKey.of("c", "n", f=1), CacheKey.of("b", "m", f=1), CacheKey.of("b", "n", g=1),
        CacheKey.of("b", "n"), CacheKey.of("bn", "n", f=1), CacheKey.of("b", "nf", f=1),
    ]  # fmt: skip
    assert len({k.digest for k in keys}) == len(keys)


@pytest.mark.parametrize("bad", ["", None, 3, b"n"])
def test_a_key_without_a_name_or_backend_is_refused(bad: Any) -> None:
    with pytest.raises(KeyFactorError, match="name"):
        CacheKey.of("b", bad)
    with pytest.raises(KeyFactorError, match="backend"):
        CacheKey.of(bad, "n")


@pytest.mark.parametrize(
    "value",
    [
        Opaque(), Opaque, object(), len, lambda: 0, bytearray(b"x"), range(3), iter([]), sys, Path("/x"), 3 .__add__,
        {"k": Opaque()}, [[(Opaque(),)]], {Opaque(): 1}, Signed(Opaque()), Tile(1, 2, [Opaque()]),  # type: ignore[list-item]
        type("SubInt", (int,), {})(3), type("SubStr", (str,), {})("x"), type("SubDict", (dict,), {})(a=1),
        type("SubList", (list,), {})([1]), Tile, Signed,
    ],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_a_value_without_a_stable_identity_is_refused_with_the_factors_name_and_a_remedy(value: Any) -> None:
    with pytest.raises(KeyFactorError) as caught:
        CacheKey.of("b", "n", fine=1, flags=value)
    line = str(caught.value)
    assert line.startswith("key factor 'flags': ")
    assert "__cache_signature__" in line
    assert "\n" not in line
    assert isinstance(caught.value, TypeError)


def test_a_structure_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    table: dict[str, Any] = {}
    table["t"] = {"u": table}
    signed = Signed(None)
    signed.value = [signed]
    for value in (loop, table, signed):
        with pytest.raises(KeyFactorError, match=r"'f': .*nested too deeply, or refers to itself"):
            digest(f=value)


def test_a_deep_structure_is_keyed_or_refused_and_never_a_recursion_error() -> None:
    deep: Any = 1
    for depth in range(5000):
        deep = [deep]
        if depth < 20:
            digest(f=deep)
    with pytest.raises(KeyFactorError):
        digest(f=deep)


def test_changing_a_value_after_the_key_was_made_does_not_change_the_key() -> None:
    flags = ["-O2"]
    key = CacheKey.of("b", "n", flags=flags)
    before = key.digest
    flags.append("-g")
    assert key.digest == before
    assert CacheKey.of("b", "n", flags=flags).digest != before


def test_an_enum_members_value_is_part_of_its_identity() -> None:
    """The code reads the value; a member that was renumbered compiles something else."""
    old, new = (enum.Enum("Mode", {"FAST": n}, module=__name__, qualname="Mode") for n in (1, 2))
    assert digest(f=old.FAST) != digest(f=new.FAST)


# --- the same digest in every process ---

_ELSEWHERE = """
import enum, sys
from dataclasses import dataclass
from kcoord.keys import CacheKey, DeviceKey, GPUTarget, Scope
class Flags(enum.Flag):
    A = 1; B = 2; C = 4
class Colour(enum.Enum):
    RED = "red"
@dataclass(frozen=True)
class Tile:
    m: int
    n: tuple
factors = dict(
    text="né\\ud800", number=-12345678901234567890, real=0.1, nan=float("nan"), raw=b"\\0", nothing=None, yes=True,
    names={f"name{n}" for n in range(200)}, frozen=frozenset([(1, 2), "x", 3.5, None]),
    table={f"k{n}": [n, {n}] for n in range(50)}, flags=Flags.A | Flags.C, none=Flags(0), colour=Colour.RED,
    tile=Tile(64, (1, 2.0)), cplx=1j,
)
key = CacheKey.of("backend", "kernel", **factors).on(DeviceKey(GPUTarget("cuda", 90, 32), 3), Scope.TARGET)
print(key.digest)
"""


def _digest_in(python: str, seed: str) -> str:
    environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(_ROOT), "PATH": os.environ["PATH"], "PYTHONUTF8": "1"}
    done = subprocess.run([python, "-c", _ELSEWHERE], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_digests_are_equal_in_processes_with_different_hash_seeds() -> None:
    assert len({_digest_in(sys.executable, seed) for seed in ("0", "1", "4242", "random")}) == 1


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_digests_are_equal_in_every_version_of_python(version: str) -> None:
    candidates = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    python = str(candidates[-1]) if candidates else shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True, timeout=60).returncode != 0:
        pytest.skip(f"no Python {version} here")
    assert _digest_in(python, "7") == _digest_in(sys.executable, "8")


# --- properties ---

_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=5) | st.binary(max_size=5)
    | st.complex_numbers(allow_nan=False) | st.sampled_from([*Colour, *Shade, *Level])
)  # fmt: skip
_HASHABLE = _SCALARS | st.tuples(_SCALARS, _SCALARS)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(_HASHABLE, inner, max_size=4)
        | st.sets(_HASHABLE, max_size=4)
        | st.builds(Tile, inner, inner)
        | st.builds(Point, inner, inner)
        | st.builds(Signed, inner)
    ),
    max_leaves=12,
)


def _canonical(value: Any) -> Any:
    """An independent notion of equality by value and type, as a nested tuple of strings."""
    kind = type(value)
    if kind in (int, str, bytes, bool, type(None)):
        return kind.__name__, repr(value)
    if kind is float:
        return "float", "nan" if value != value else value.hex()
    if kind is complex:
        return "complex", _canonical(value.real), _canonical(value.imag)
    if isinstance(value, enum.Enum):
        return "enum", kind.__qualname__, value.name
    if kind in (list, tuple):
        return kind.__name__, tuple(_canonical(v) for v in value)
    if kind is dict:
        return "dict", tuple(sorted((repr(_canonical(k)), repr(_canonical(v))) for k, v in value.items()))
    if kind is set:
        return "set", tuple(sorted(repr(_canonical(v)) for v in value))
    if kind is Tile:
        return "Tile", _canonical(value.m), _canonical(value.n), _canonical(value.names)
    if kind is Point:
        return "Point", _canonical(value.x), _canonical(value.y)
    assert kind is Signed
    return "Signed", _canonical(value.value)


@settings(max_examples=150, deadline=None)
@given(_VALUES, _VALUES)
def test_two_structures_have_equal_digests_exactly_when_they_are_equal_by_value_and_type(one: Any, other: Any) -> None:
    assert (digest(f=one) == digest(f=other)) == (_canonical(one) == _canonical(other))


@settings(max_examples=100, deadline=None)
@given(_VALUES, st.randoms(use_true_random=False))
def test_shuffling_mappings_and_sets_anywhere_inside_changes_nothing(value: Any, randomness: Any) -> None:
    def shuffled(v: Any) -> Any:
        if type(v) is dict:
            items = [(k, shuffled(w)) for k, w in v.items()]
            randomness.shuffle(items)
            return dict(items)
        if type(v) is set:
            members = list(v)
            randomness.shuffle(members)
            return set(members)
        if type(v) in (list, tuple):
            return type(v)(shuffled(w) for w in v)
        return v

    assert digest(f=shuffled(value)) == digest(f=value)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=8), _VALUES, max_size=4))
def test_a_key_survives_the_wire(factors: dict[str, Any]) -> None:
    key = CacheKey.of("backend", "kernel", f=factors).with_details({"detail": factors})
    again = CacheKey.from_wire(key.to_wire())
    assert again == key
    assert again.digest == key.digest
    assert again.diff(key) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda w: w.pop("name"), lambda w: w.pop("details"), lambda w: w.update(backend=3), lambda w: w.update(factors=7),
        lambda w: w.update(factors=["x"]), lambda w: w.update(factors=[["a", "b"]]), lambda w: w.update(factors=None),
        lambda w: w.update(factors=[["a", "b", "c", ["d"]]]), lambda w: w.update(factors=[[1, "b", "c", []]]),
        lambda w: w.update(details="text"),
    ],
)  # fmt: skip
def test_a_wire_that_is_no_key_is_refused(damage: Any) -> None:
    wire = CacheKey.of("b", "n", f=1).to_wire()
    damage(wire)
    with pytest.raises((ValueError, TypeError, KeyError)):
        CacheKey.from_wire(wire)


def test_factors_nested_without_end_are_refused_and_overflow_no_stack() -> None:
    wire: list[Any] = ["n", "d", "t", []]
    for _ in range(5000):
        wire = ["n", "d", "t", [wire]]
    with pytest.raises(ValueError, match="too deeply"):
        Factor.from_wire(wire)


# --- explanations ---


def test_a_diff_names_the_factors_that_differ_and_no_others() -> None:
    ours = CacheKey.of("b", "n", source="x = 1", num_warps=4, same=1)
    theirs = CacheKey.of("b", "n", source="x = 2", num_warps=8, same=1)
    assert [str(d) for d in ours.diff(theirs)] == ["num_warps: 4 → 8", "source: x = 1 → x = 2"]


def test_a_diff_goes_into_mappings_and_says_what_is_unset() -> None:
    ours = CacheKey.of("triton", "k", env={"CUDA_HOME": "/usr", "OLD": "x"})
    theirs = CacheKey.of("triton", "k", env={"CUDA_HOME": "/usr", "TRITON_DISABLE_LINE_INFO": "1"})
    assert [str(d) for d in ours.diff(theirs)] == ["env OLD: x → unset", "env TRITON_DISABLE_LINE_INFO: unset → 1"]


def test_a_diff_goes_into_dataclasses() -> None:
    ours = CacheKey.of("b", "n").on(DeviceKey(GPUTarget("cuda", 90, 32), 0), Scope.TARGET)
    theirs = CacheKey.of("b", "n").on(DeviceKey(GPUTarget("cuda", 100, 32), 0), Scope.TARGET)
    assert [str(d) for d in ours.diff(theirs)] == ["target arch: 90 → 100"]


def test_a_diff_tells_apart_values_that_look_alike() -> None:
    for one, other in [("x" * 500 + "a", "x" * 500 + "b"), (1, "1"), (Signed([1]), OtherSigned([1]))]:
        (difference,) = CacheKey.of("b", "n", f=one).diff(CacheKey.of("b", "n", f=other))
        assert difference.ours != difference.theirs


def test_a_diff_of_names_and_backends_says_so() -> None:
    assert [str(d) for d in CacheKey.of("b", "n").diff(CacheKey.of("c", "m"))] == ["backend: b → c", "name: n → m"]


def test_details_are_shown_and_identify_nothing() -> None:
    plain = CacheKey.of("b", "n", hash="abc")
    ours = plain.with_details({"ptxas": "12.8", "unencodable": Opaque()})
    assert ours.digest == plain.digest
    assert [d.name for d in ours.details] == ["ptxas"]
    theirs = CacheKey.of("b", "n", hash="def").with_details({"ptxas": "13.0"})
    assert [str(d) for d in ours.diff(theirs)] == ["hash: abc → def", "ptxas: 12.8 → 13.0"]


def test_long_values_are_shortened_for_people_only() -> None:
    factor = make_factor("f", "y" * 10_000)
    assert len(factor.text) <= 200
    assert factor.digest != make_factor("f", "y" * 10_001).digest


# --- scopes ---

_H100 = DeviceKey(GPUTarget("cuda", 90, 32), 0)
_H100_1 = DeviceKey(GPUTarget("cuda", 90, 32), 1)
_B200 = DeviceKey(GPUTarget("cuda", 100, 32), 0)
_MI300 = DeviceKey(GPUTarget("hip", "gfx942", 64), 0)


def test_no_scope_lets_different_targets_share_an_artifact() -> None:
    for scope in Scope:
        digests = {CacheKey.of("b", "n").on(d, scope).digest for d in (_H100, _B200, _MI300)}
        assert len(digests) == 3


def test_equal_gpus_share_an_artifact_of_scope_target_and_model_and_not_of_scope_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = CacheKey.of("b", "n", f=1)
    assert key.on(_H100, Scope.TARGET) == key.on(_H100_1, Scope.TARGET)
    assert key.on(_H100, Scope.MODEL) == key.on(_H100_1, Scope.MODEL)
    assert key.on(_H100, Scope.DEVICE) != key.on(_H100_1, Scope.DEVICE)
    model = {"name": "H100 SXM"}
    monkeypatch.setattr("kcoord.keys.device.model_of", lambda device: model["name"])
    sxm = {scope: key.on(_H100, scope).digest for scope in Scope}
    model["name"] = "H100 PCIe"
    pcie = {scope: key.on(_H100, scope).digest for scope in Scope}
    assert [scope for scope in Scope if sxm[scope] != pcie[scope]] == [Scope.MODEL, Scope.DEVICE]


def test_the_three_scopes_of_one_key_are_three_keys() -> None:
    assert len({CacheKey.of("b", "n").on(_H100, scope).digest for scope in Scope}) == 3


def test_targets_are_parsed_from_text_and_nothing_else_is() -> None:
    assert GPUTarget.parse("cuda:90") == GPUTarget("cuda", 90, 32)
    assert GPUTarget.parse("hip:gfx942") == GPUTarget("hip", "gfx942", 64)
    assert GPUTarget.parse("hip:gfx1100") == GPUTarget("hip", "gfx1100", 32)
    for text in ("", "cuda", "cuda:", "cuda:sm_90", "hip:90", "metal:3", "cuda:-1"):
        with pytest.raises(ValueError, match="write cuda:90, cuda:90a or hip:gfx942"):
            GPUTarget.parse(text)


def test_more_factors_replace_those_of_the_same_name() -> None:
    key = CacheKey.of("b", "n", a=1, c=3)
    assert key.with_factors(b=2, a=9) == CacheKey.of("b", "n", a=9, b=2, c=3)
    assert key == CacheKey.of("b", "n", a=1, c=3)
