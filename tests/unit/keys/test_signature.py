"""Arguments: tokens that are equal only for equal arguments, and canonical values that say no more and no less."""

from __future__ import annotations

import collections
import copy
import enum
import functools
import gc
import sys
import threading
import types
import weakref
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.errors import KeyFactorError
from kcoord.keys import CacheKey
from kcoord.keys.arguments import argument_types, signature
from kcoord.keys.arguments.signature import Arguments, register_signature
from kcoord.keys.cache_key import encode

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
tl = pytest.importorskip("triton.language")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

_ROOT = Path(__file__).parents[3]
NAN = float("nan")
ONE = Arguments(("x",))


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    ONE = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass
class Tile:
    m: int
    n: Any = 0
    names: list[Any] = field(default_factory=list)


@dataclass
class OtherTile:
    m: int
    n: Any = 0
    names: list[Any] = field(default_factory=list)


class Point(NamedTuple):
    x: Any
    y: Any


class Signed:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __cache_signature__(self) -> Any:
        return self.value


class OtherSigned(Signed):
    pass


class Opaque(threading.local):
    pass


class Sharded(torch.Tensor):
    """A tensor that is more than its metadata."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


class Tagged(torch.Tensor):
    """A tensor that adds nothing."""


class Scaled(Sharded):
    def __cache_signature__(self) -> Any:
        return {"scale": self.scale, "inner": self.inner}


def scaled(scale: float, inner: Any) -> Any:
    made = Scaled(inner)
    made.scale, made.inner = scale, inner
    return made


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_by_type", "_by_name"):
        monkeypatch.setattr(signature, name, {})
    monkeypatch.setattr(signature, "_types", dict(signature.argument_types.PLAIN))


def token(value: Any, device_id: int = 0) -> Any:
    return ONE.token((value,), device_id)


def encoding(value: Any, device_id: int = 0) -> bytes:
    return encode(ONE.canonical(token(value, device_id)))


def digest(value: Any, **options: Any) -> str:
    arguments = Arguments(("x",), **options)
    return CacheKey.of("b", "n", arguments=arguments.canonical(arguments.token((value,)))).digest


def differ(one: Any, other: Any) -> bool:
    """Whether two values differ; that tokens and encodings agree on it is what this module is about."""
    tokens = hash(token(one)) != hash(token(other)) or token(one) != token(other)
    assert tokens == (encoding(one) != encoding(other)), f"{one!r} {other!r}"
    return tokens


def meta(*shape: int, **options: Any) -> Any:
    return torch.empty(*shape, device="meta", **options)


def fake(*shape: int, **options: Any) -> Any:
    """Also of a GPU that this machine has not: nothing is initialized for it."""
    with patch("torch._subclasses.fake_tensor.init_gpu_context", create=True), FakeTensorMode():
        return torch.empty(*shape, **options)


def aligned(offset: int) -> Any:
    """A tensor of 16 bytes at `offset` from an address that is a multiple of 64 (torch's allocator gives those)."""
    return torch.zeros(64, dtype=torch.uint8)[offset : offset + 16]


def function() -> None: ...


_BASE = torch.zeros(8, 8)

DIFFERENT: list[Any] = [
    None, False, True, 0, 1, -1, 2**70, 0.0, -0.0, 1.0, NAN, float("inf"), 0j, 1j, complex(0, -0.0), complex(-0.0, 0),
    "", "1", "nan", "-0.0", "None", b"", b"1", b"nan", [], (), set(), {}, [1], (1,), {1}, [True],
    [1.0], [[]], [()], [1, 2], [2, 1], [12], ["1", "2"], ["", "12"], [[1], 2], {"a": 1}, {"a": True}, {"a": [1]},
    {1: "a"}, {True: "a"}, {"a": 1, "b": 2}, {("a", "b"): 1}, {1, 2}, {(1, 2)}, {1.5}, {Point(1, 2)}, int, float, len,
    Colour.RED, Colour.BLUE, Level.ONE, Access.READ, Access.READ | Access.WRITE, Access(0),
    Tile(1), Tile(2), Tile(1, 2), Tile(1, 2.0), Tile(1, 0, ["x"]), OtherTile(1), Tile(Tile(1)),  # type: ignore[arg-type]
    Point(1, 2), Point(1.0, 2), Point(2, 1), Signed(1), Signed(1.0), Signed([1]), Signed((1,)), OtherSigned(1), Signed(Signed(1)),
    # tensors
    _BASE, _BASE.double(), torch.zeros(8, 9), torch.zeros(64), torch.zeros(8, 8, 1), _BASE.t(), _BASE[::2], torch.zeros(()),
    torch.zeros(0), torch.nn.Parameter(_BASE), _BASE.clone().as_subclass(Tagged), _BASE.to_sparse(), meta(8, 8),
    aligned(0), aligned(1), aligned(2), aligned(4), aligned(8),
    scaled(0.5, _BASE), scaled(0.25, _BASE), [_BASE], (_BASE,), {"w": _BASE}, Tile(1, _BASE),
    torch.float32, torch.float64, torch.strided, torch.sparse_coo, torch.contiguous_format, torch.channels_last,
    torch.per_tensor_affine, torch.device("cpu"), torch.device("cuda"), torch.device("cuda:0"), torch.device("cuda:1"),
    torch.Size([1, 2]), torch.Size([2, 1]),
    # arrays
    np.zeros((8, 9)), np.zeros((8, 9), np.float32), np.zeros((8, 9), ">f8"), np.zeros((8, 9), order="F"), np.zeros(8),
    np.zeros((8, 9)).view(np.matrix), np.zeros(2, [("a", "i4")]), np.zeros(2, [("b", "i4")]), np.zeros(9, "b")[1:],
    np.dtype("f4"), np.dtype(">f4"), np.dtype([("a", "i4")]), np.dtype("M8[s]"), np.dtype("M8[ms]"), np.float32,
    np.float32(1), np.float64(1), np.float32(-0.0), np.float32(0.0), np.float32(NAN), np.int64(1), np.bool_(True),
    np.str_("1"), np.bytes_(b"1"), np.complex64(1), np.longdouble(1) / 3, np.longdouble(1) / 7,
    np.datetime64("2020-01-01"), np.datetime64("2020-01-01", "s"), np.timedelta64(1, "s"), np.timedelta64(1, "D"),
    # Triton
    tl.float32, tl.int32, tl.pointer_type(tl.float32), tl.pointer_type(tl.float32, 3), tl.block_type(tl.int8, [2]),
    tl.pointer_type(tl.float32, const=True), tl.constexpr(1), tl.constexpr(1.0), tl.constexpr(True),
    tl.constexpr(tl.float32), tl.constexpr((1, 2)), tl.constexpr([1, 2]),
]  # fmt: skip


def different() -> list[Any]:
    """`DIFFERENT` and fake tensors, whose first one imports torch's compiler: not while tests are collected."""
    return [*DIFFERENT, fake(8, 8), fake(8, 8, device="cuda:0"), fake(8, 8, device="cuda:1")]


def test_no_two_different_values_share_a_token_or_an_encoding() -> None:
    tokens: dict[Any, Any] = {}
    encodings: dict[bytes, Any] = {}
    for value in different():
        assert token(value) not in tokens, f"{value!r} and {tokens[token(value)]!r} share a token"
        assert encoding(value) not in encodings, f"{value!r} and {encodings[encoding(value)]!r} share an encoding"
        tokens[token(value)] = encodings[encoding(value)] = value


def test_a_value_has_one_token_however_often_it_is_made() -> None:
    for value in different():
        assert token(value) == token(value)
        addressed = isinstance(value, (torch.Tensor, np.ndarray))
        if not addressed and not type(value).__module__.startswith("triton"):  # Triton's cannot be copied
            assert not differ(value, copy.deepcopy(value))
    assert not differ(NAN, float("inf") - float("inf"))
    assert not differ(complex(NAN, 1), complex(-NAN, 1))
    assert not differ({"a", "b", "c"}, {"c", "b", "a"})
    assert differ({torch.zeros(2)}, {torch.zeros(2), torch.ones(2)})
    assert differ({float("nan")}, {float("nan"), float("inf") - float("inf")})


def test_what_is_no_difference_to_a_key_is_none_to_an_argument() -> None:
    assert encoding({1, 2}) == encoding({2, 1})
    assert encoding({"a": 1, "b": 2}) == encoding({"b": 2, "a": 1})
    for mapping in (collections.Counter("a"), types.MappingProxyType({"a": 1})):
        assert encoding(mapping) != encoding({"a": 1}), "another class has other methods"


_SCALARS: Any = st.sampled_from(
    [None, True, False, 0, 1, 2, 0.0, -0.0, 1.0, NAN, -NAN, "", "1", "a", b"", b"1", 1j, 0j, Colour.RED, Level.ONE,
     Access.READ, torch.float32, torch.int8, np.float32(1), np.float64(1), np.int8(0), tl.float32]
)  # fmt: skip
_HASHABLE = _SCALARS | st.tuples(_SCALARS, _SCALARS)
_TENSORS = st.builds(
    lambda shape, dtype, device: torch.empty(shape, dtype=dtype, device=device),
    st.lists(st.sampled_from([1, 2, 16]), max_size=2),
    st.sampled_from([torch.float32, torch.int32]),
    st.sampled_from(["cpu", "meta"]),
)
_VALUES = st.recursive(
    _SCALARS | _TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_HASHABLE, inner, max_size=3)
        | st.sets(_HASHABLE, max_size=3)
        | st.builds(Tile, inner, inner)
        | st.builds(Point, inner, inner)
        | st.builds(Signed, inner)
        | inner.map(tl.constexpr)
    ),
    max_leaves=6,
)


def _identity(value: Any) -> Any:
    """An independent notion of identity by value and type, as nested tuples of texts."""
    kind = type(value).__qualname__
    if isinstance(value, torch.Tensor):
        return kind, str(value.dtype), tuple(value.shape), value.stride(), value.device.type
    if isinstance(value, enum.Enum):
        return kind, value.name
    if isinstance(value, float) and value != value:
        return kind, "nan"
    if isinstance(value, Point):
        return kind, _identity(value.x), _identity(value.y)
    if isinstance(value, (list, tuple)):
        return kind, tuple(map(_identity, value))
    if isinstance(value, dict):
        return kind, tuple(sorted((repr(_identity(k)), repr(_identity(v))) for k, v in value.items()))
    if isinstance(value, set):
        return kind, tuple(sorted({repr(_identity(v)) for v in value}))
    if isinstance(value, Tile):
        return kind, _identity(value.m), _identity(value.n), _identity(value.names)
    if isinstance(value, (Signed, tl.constexpr)):
        return kind, _identity(value.value)
    return kind, repr(value)


@settings(max_examples=400, deadline=None)
@given(_VALUES, _VALUES)
def test_equal_tokens_mean_equal_encodings_and_both_mean_equal_values(one: Any, other: Any) -> None:
    equal = _identity(one) == _identity(other)
    assert (encoding(one) == encoding(other)) == equal
    if token(one) == token(other):
        assert equal


# --- live, and without a trace ---


def test_what_can_change_is_read_at_each_call_and_an_earlier_token_stays_as_it_was() -> None:
    items, table, tile, signed = [1], {"a": 1}, Tile(1), Signed(1)
    values = (items, table, tile, signed)
    arguments = Arguments(("items", "table", "tile", "signed"))
    before = arguments.token(values)
    said = encode(arguments.canonical(before))
    items.append(2)
    table["b"] = 2
    tile.m = 2
    signed.value = 2
    after = arguments.token(values)
    assert all(one != other for one, other in zip(before[1:], after[1:], strict=True))
    assert encode(arguments.canonical(before)) == said
    del items[1], table["b"]
    tile.m = signed.value = 1
    assert arguments.token(values) == before


def test_a_token_keeps_no_argument_alive() -> None:
    tensor, tile, array = torch.zeros(4), Tile(1), np.zeros(4)
    kept = Arguments(("a", "b", "c", "d")).token((tensor, tile, array, [tensor]))
    gone = [weakref.ref(value) for value in (tensor, tile, array)]
    del tensor, tile, array
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    assert len(kept) == 5


def test_classes_without_end_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signature, "_MOST_TYPES", 50)
    for n in range(200):
        token(type(f"C{n}", (Signed,), {})(n))
        assert len(signature._types) <= 50


# --- tensors ---


def fields_of(value: Any, device_id: int = 0) -> dict[str, Any]:
    return dict(ONE.canonical(token(value, device_id))["x"])


def test_a_tensor_is_its_metadata_and_not_its_content() -> None:
    assert not differ(torch.zeros(8, 8), torch.ones(8, 8))
    assert fields_of(torch.zeros(2, 3, dtype=torch.float16)) == {
        "dtype": "torch.float16", "shape": (2, 3), "strides": (3, 1), "device": "cpu", "alignment": 16,
    }  # fmt: skip


def test_alignment_counts_up_to_sixteen_bytes_as_triton_specializes_it() -> None:
    assert [fields_of(aligned(n))["alignment"] for n in (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)] == [
        16, 1, 2, 1, 4, 2, 8, 4, 16, 16,
    ]  # fmt: skip
    assert encoding(aligned(1)) == encoding(aligned(3))


def test_a_tensor_without_storage_counts_by_its_metadata() -> None:
    for value in (meta(8, 8), fake(8, 8), torch._to_functional_tensor(torch.zeros(8, 8))):
        assert fields_of(value)["shape"] == (8, 8)
    with FakeTensorMode():
        assert not differ(torch.empty(8, 8), torch.ones(8, 8))


def test_a_size_that_is_not_known_is_an_error() -> None:
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    value = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.zeros(5), symbolic_context=context)
    with pytest.raises(KeyFactorError, match=r"arguments\.x: a size is not known"):
        token(value)
    with pytest.raises(KeyFactorError, match=r"arguments\.x: a size is not known"):
        token(value.shape)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_without_a_shape_is_an_error() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for value in (nested, torch.nn.parameter.UninitializedParameter()):
        with pytest.raises(KeyFactorError, match=r"arguments\.x: this torch\..* has no shape"):
            token(value)


def test_a_tensor_that_is_more_than_its_metadata_must_say_what_it_is() -> None:
    with pytest.raises(KeyFactorError, match=r"Sharded has no identity.*__cache_signature__.*register_signature"):
        token(Sharded(_BASE))
    assert differ(scaled(1.0, _BASE), scaled(2.0, _BASE))
    assert differ(scaled(1.0, _BASE), scaled(1.0, torch.zeros(8, 9)))


def test_the_current_gpu_is_the_same_to_every_rank_under_whatever_index() -> None:
    ranks = [fake(8, device=f"cuda:{rank}") for rank in range(4)]
    assert len({encoding(tensor, rank) for rank, tensor in enumerate(ranks)}) == 1
    assert len({encoding(torch.device("cuda", rank), rank) for rank in range(4)}) == 1
    elsewhere = {encoding(ranks[1], 0), encoding(ranks[2], 0), encoding(ranks[0], 0), encoding(ranks[0], 3)}
    assert len(elsewhere) == 4
    assert token(ranks[0], 0) != token(ranks[0], 3), "a switch of the current device moves the token"
    assert fields_of(ranks[2], 2)["device"] == "cuda:current"
    assert fields_of(ranks[2], 0)["device"] == "cuda:2"


def test_a_dynamic_argument_counts_as_triton_specializes_it() -> None:
    dynamic = {"dynamic": ("x",)}
    assert digest(torch.zeros(32, 48), **dynamic) == digest(torch.zeros(64, 16), **dynamic)
    assert digest(torch.zeros(7, 48), **dynamic) == digest(torch.zeros(9, 16), **dynamic)
    shapes = [(32, 48), (1, 48), (7, 48), (32, 1), (32, 7), (32,), (32, 48, 16)]
    assert len({digest(torch.zeros(shape), **dynamic) for shape in shapes}) == len(shapes)
    assert digest(torch.zeros(16, 16), **dynamic) != digest(torch.zeros(16, 16, dtype=torch.int8), **dynamic)
    assert digest(torch.zeros(16, 16).t()[:, ::2], **dynamic) != digest(torch.zeros(16, 8), **dynamic)
    assert digest(torch.zeros(16, 16), **dynamic) != digest(torch.zeros(16, 16))
    assert digest([{"w": torch.zeros(32)}], **dynamic) == digest([{"w": torch.zeros(64)}], **dynamic)
    assert digest(Tile(1, torch.zeros(32)), **dynamic) == digest(Tile(1, torch.zeros(64)), **dynamic)
    assert digest({torch.zeros(32)}, **dynamic) == digest({torch.zeros(64)}, **dynamic)
    assert digest({torch.zeros(32), torch.zeros(64)}, **dynamic) != digest({torch.zeros(32)}, **dynamic)
    assert digest(32, **dynamic) != digest(64, **dynamic), "a number is its value"
    assert digest(np.zeros((32, 32)), **dynamic) == digest(np.zeros((64, 64)), **dynamic)


def test_only_the_arguments_that_are_named_are_dynamic() -> None:
    arguments = Arguments(("a", "b"), dynamic=("b",))

    def said(a: int, b: int) -> bytes:
        return encode(arguments.canonical(arguments.token((torch.zeros(a), torch.zeros(b)))))

    assert said(32, 48) == said(32, 64)
    assert said(48, 32) != said(64, 32)
    with pytest.raises(KeyFactorError, match=r"dynamic='c' is no argument: there are a, b"):
        Arguments(("a", "b"), dynamic=("c",))


def test_a_triton_kernel_counts_by_its_cache_key() -> None:
    sys.path.insert(0, str(_ROOT / "tests" / "support" / "programs"))
    try:
        import kernels
    finally:
        sys.path.pop(0)
    assert differ(kernels.scale, kernels.broken)
    assert fields_of(kernels.scale) == {"content": kernels.scale.cache_key}


# --- functions and classes ---


def test_functions_and_classes_are_what_the_caller_says_of_them_at_each_call() -> None:
    content = {"function": 1}
    arguments = Arguments(("x",), functions=lambda f: content.get(f.__name__, 0))

    def said(value: Any) -> Any:
        return arguments.token((value,))

    before = said([function])
    assert before == said([function])
    content["function"] = 2
    assert before != said([function])
    assert said(Opaque) != said(function)
    for value in (function, Opaque, enum.EnumMeta, functools.partial(function, 1)):
        with pytest.raises(KeyFactorError, match=r"arguments\.x\[0\]: a \w+ has no identity here"):
            token([value])


def test_a_function_that_the_caller_cannot_key_is_an_error_with_its_path() -> None:
    def refuse(value: Any) -> Any:
        raise KeyFactorError("it reads a socket")

    with pytest.raises(KeyFactorError, match=r"^arguments\.x\['f'\]: it reads a socket$"):
        Arguments(("x",), functions=refuse).token(({"f": function},))


def test_code_that_claims_to_be_pythons_own_is_not_believed() -> None:
    namespace: dict[str, Any] = {}
    exec("class int: pass", namespace)
    assert namespace["int"].__module__ == "builtins"
    with pytest.raises(KeyFactorError, match="no identity"):
        token(namespace["int"])


# --- types that nobody described ---


@pytest.mark.parametrize(
    "value",
    [
        Opaque(), iter([]), torch.Generator(), torch.nn.Linear(2, 2),
        type("SubInt", (int,), {})(3), type("SubStr", (str,), {})("x"), type("SubList", (list,), {})([1]),
        type("SubDict", (dict,), {})(a=1), memoryview(b"x"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_an_unknown_type_is_refused_with_its_path_and_both_remedies(value: Any) -> None:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    arguments = Arguments(("n", "config"))
    for holder, path in [
        (value, "config"),
        (Tile(1, {"layers": [0, 1, 2, value]}), "config.n['layers'][3]"),
        (Point((value,), 1), "config.x[0]"),
        (Signed([value]), "config.__cache_signature__[0]"),
    ]:
        with pytest.raises(KeyFactorError) as caught:
            arguments.token((1, holder))
        line = str(caught.value)
        assert line.startswith(f"arguments.{path}: a value of type {kind} has no identity")
        assert "__cache_signature__()" in line
        assert f'kcoord.register_signature("{kind}", function)' in line
        assert "\n" not in line


def test_an_unhashable_moment_names_the_key_or_the_member() -> None:
    with pytest.raises(KeyFactorError, match=r"^arguments\.x\.keys\(\): "):
        token({Opaque(): 1})
    with pytest.raises(KeyFactorError, match=r"^arguments\.x{…}: "):
        token({Opaque()})


@pytest.mark.parametrize("path", [Path("/etc/hosts"), PurePosixPath("x")])
def test_a_path_is_refused_for_it_says_nothing_of_its_file(path: Any) -> None:
    with pytest.raises(KeyFactorError, match=r"arguments\.x: a path .*trees=.*read_bytes"):
        token(path)


def test_a_structure_that_contains_itself_or_is_too_deep_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    table: dict[str, Any] = {}
    table["t"] = table
    signed = Signed(None)
    signed.value = signed
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    for value in (loop, table, signed, deep):
        with pytest.raises(KeyFactorError, match=r"^arguments\.x.*refers to itself: give.*"):
            token(value)


# --- the registry ---


class Foreign:
    def __init__(self, value: Any) -> None:
        self.value = value


class Derived(Foreign):
    pass


def value_of(foreign: Foreign) -> Any:
    return foreign.value


def test_a_registered_type_is_what_its_describer_says_at_each_call() -> None:
    register_signature(Foreign, value_of)
    value = Foreign([1, torch.zeros(2)])
    before = token(value)
    assert before == token(Foreign([1, torch.ones(2)]))
    value.value.append(2)
    assert before != token(value)
    assert differ(Foreign(1), Foreign(1.0))
    assert differ(Foreign(1), Signed(1))


def test_a_type_that_is_registered_while_it_is_looked_up_is_what_was_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_up = signature._described

    def slow(kind: type) -> Any:
        found = look_up(kind)
        if not signature._by_type:
            register_signature(Tile, lambda value: "one of many")
        return found

    monkeypatch.setattr(signature, "_described", slow)
    token(Tile(1))
    assert not differ(Tile(1), Tile(2))


@pytest.mark.parametrize("name", [f"{__name__}.Foreign", "elsewhere.Foreign"])
def test_a_type_is_registered_by_the_name_where_it_is_defined_or_from_where_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    register_signature(name, value_of)
    elsewhere = types.ModuleType("elsewhere")
    elsewhere.Foreign = Foreign  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    assert not differ(Foreign(1), Foreign(1))
    assert differ(Foreign(1), Foreign(2))


def test_a_subclass_is_described_by_what_is_nearest_to_it() -> None:
    register_signature(Foreign, lambda value: ("base", value.value))
    assert differ(Derived(1), Foreign(1)), "the class is part of it"
    derived = token(Derived(1))
    register_signature(Derived, lambda value: "exact")
    assert token(Derived(1)) == token(Derived(2))
    assert token(Derived(1)) != derived

    class Own(Foreign):
        def __cache_signature__(self) -> Any:
            return "its own"

    assert not differ(Own(1), Own(2))


def test_a_description_replaces_what_was_known_of_a_type() -> None:
    before, tensor = token(Tile(1)), token(_BASE)
    said = encode(ONE.canonical(before))
    register_signature(Tile, lambda value: "one of many")
    assert not differ(Tile(1), Tile(2))
    register_signature("torch.Tensor", lambda value: tuple(value.shape))
    assert not differ(torch.zeros(2), torch.zeros(2, dtype=torch.int8))
    assert token(_BASE) != tensor
    assert encode(ONE.canonical(before)) == said, "an earlier token is read as it was written"


def test_a_registration_that_cannot_work_is_refused() -> None:
    for kind in (int, str, list, dict, type(None), object, "builtins.object", "builtins.list"):
        with pytest.raises(KeyFactorError, match="its own description"):
            register_signature(kind, value_of)
    for name in ("Foreign", "", "a..b", "torch.", "my-module.X"):
        with pytest.raises(KeyFactorError, match="no qualified name"):
            register_signature(name, value_of)
    with pytest.raises(KeyFactorError, match="needs a function"):
        register_signature(Foreign, "value")  # type: ignore[arg-type]


# --- explanations ---


def test_the_difference_of_two_calls_is_named_down_to_the_field() -> None:
    arguments = Arguments(("x", "tile"))

    def of(*values: Any) -> CacheKey:
        return CacheKey.of("b", "n", arguments=arguments.canonical(arguments.token(values)))

    ours, theirs = of(torch.zeros(2, 3), Tile(64)), of(torch.zeros(2, 3, dtype=torch.int8), Tile(128))
    found = {d.name.replace(" ", ".").split(".")[-2:][-1]: (d.ours, d.theirs) for d in ours.diff(theirs)}
    assert found["dtype"] == ("torch.float32", "torch.int8")
    assert found["m"] == ("64", "128")
    assert set(found) == {"dtype", "m"}


def test_the_digest_of_a_described_value_is_the_same_in_every_release() -> None:
    """A store outlives kcoord's modules: where a class of kcoord lies must not enter the keys."""
    described = argument_types.Described("torch.Tensor", {"dtype": "torch.float32", "shape": (2, 3)})
    assert (
        CacheKey.of("python", "build", x=described).digest
        == "4b32b0d016a8f4f3b7d0e0b2f563d263a72b253e1ace2f565caea2a65228fb07"
    )
