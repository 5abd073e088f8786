"""The argument types of torch, NumPy, Triton and Python's library, known by their qualified names: nothing is imported here.

As arguments, tensors and arrays count by their metadata, never by their content: class, dtype, shape, strides, device, and the
alignment of their address up to 16 bytes, on which Triton specializes. Reading it copies, exports and synchronizes nothing.
Attributes that a program adds to a tensor do not count, nor the contents of a sparse tensor beside layout, shape and dtype.

Code may read the tensors and arrays that it *holds* (a global, a closure value, a default): these count by content, if small.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sys
from collections.abc import Callable
from typing import Any

from kcoord.errors import KeyFactorError
from kcoord.keys.arguments.argument_types import (
    ArgumentType,
    Code,
    Described,
    Describer,
    Fields,
    NoIdentity,
    OrderedMapping,
    Token,
    described,
)
from kcoord.keys.cache_key import qualified

_ALIGNMENT = 16  # bytes: no compiler here asks for more
_LARGEST = 16 << 20  # bytes: each call reads them again, which takes about 10 ms
_PASS_IT = "pass it as an argument, which counts by its shape and dtype"


class Tensor(ArgumentType):
    """A tensor. Its token: type, dtype, shape, strides, address modulo 16, device, and its layout if that is not strided."""

    def token(self, value: Any, describer: Describer, depth: int) -> Token:
        try:
            address = value.data_ptr() % _ALIGNMENT
            return (self, value.dtype, value.shape, value.stride(), address, value.device)
        except (RuntimeError, ValueError):
            return self.without_address(value)

    def without_address(self, value: Any) -> Token:
        """The token of a tensor of another layout, or without storage."""
        layout = str(value.layout)
        other = () if layout == "torch.strided" else (layout,)
        try:
            shape, strides = value.shape, () if other else value.stride()
        except (RuntimeError, ValueError):
            raise NoIdentity(f"this {self.name} has no shape (nested, or not initialized): pass its parts") from None
        _check_sizes((*shape, *strides))
        return (self, value.dtype, shape, strides, None, value.device, *other)

    def canonical(self, token: Token, device_id: int) -> Any:
        _, dtype, shape, strides, address, device, *layout = token
        fields = {"dtype": str(dtype), "shape": tuple(shape), "strides": strides, "device": _placed(device, device_id)}
        if address is not None:
            fields["alignment"] = (address | _ALIGNMENT) & -(address | _ALIGNMENT)
        if layout:
            fields["layout"] = layout[0]
        return Described(self.name, fields)

    def generalized(self, token: Token) -> Token:
        _, dtype, shape, strides, *rest = token
        return (self, dtype, _classes(shape), _classes(strides), *rest)

    def content(self, value: Any) -> list[Any]:
        """The values of `content_type`. Raises `NoIdentity` unless `value` is plain, in the CPU's memory and small enough."""
        plain = type(value).__name__ in ("Tensor", "Parameter") and str(value.layout) == "torch.strided"
        if not plain or value.device.type != "cpu" or value.is_quantized:
            raise NoIdentity(
                f"code that holds this {self.name} may read it, and its content cannot be hashed: {_PASS_IT}"
            )
        size = value.numel() * value.element_size()
        _check_size(size)
        flat = value.detach().resolve_conj().resolve_neg().contiguous()
        data = ctypes.string_at(flat.data_ptr(), size) if size else b""
        return [str(value.dtype), tuple(value.shape), value.stride(), hashlib.sha256(data).hexdigest()]


class JitFunction(Code):
    """A Triton function: by content, as any other; where no code is followed, by Triton's own cache key."""

    def token(self, value: Any, describer: Describer, depth: int) -> Token:
        return (self, value.cache_key) if describer.functions is None else super().token(value, describer, depth)


class Storageless(Tensor):
    """A tensor that stands for another during a trace: its address means nothing, and reading it may warn."""

    def token(self, value: Any, describer: Describer, depth: int) -> Token:
        return self.without_address(value)

    def content(self, value: Any) -> list[Any]:
        raise NoIdentity(f"a {self.name} holds nothing that could be read: {_PASS_IT}")


class Array(Tensor):
    """A NumPy array; its strides are in bytes."""

    def token(self, value: Any, describer: Describer, depth: int) -> Token:
        address = value.__array_interface__["data"][0] % _ALIGNMENT
        return (self, _dtype_text(value.dtype), value.shape, value.strides, address, None)

    def content(self, value: Any) -> list[Any]:
        if self.name not in ("numpy.ndarray", "numpy.memmap", "numpy.matrix") or value.dtype.hasobject:
            raise NoIdentity(
                f"code that holds this {self.name} may read it, and its content cannot be hashed: {_PASS_IT}"
            )
        _check_size(value.nbytes)
        return [_dtype_text(value.dtype), value.shape, value.strides, hashlib.sha256(value.tobytes()).hexdigest()]


def content_type(tensor: Tensor) -> ArgumentType:
    """The type of tensors or arrays that count by their content."""
    return Fields(tensor.kind, ("dtype", "shape", "strides", "sha256"), read=tensor.content)


def _check_size(size: int) -> None:
    if size > _LARGEST:
        raise NoIdentity(
            f"it holds {size >> 20} MiB, and each call would hash them (at most {_LARGEST >> 20}): {_PASS_IT}"
        )


def _check_sizes(sizes: Any) -> None:
    if not all(type(size) is int for size in sizes):
        raise NoIdentity(f"a size is not known yet: {tuple(map(str, sizes))}")


@functools.lru_cache(maxsize=4096)
def _classes(sizes: tuple[int, ...]) -> tuple[str, ...]:
    return tuple("1" if n == 1 else "other" if n % 16 else "multiple of 16" for n in sizes)


def _placed(device: Any, device_id: int) -> str:
    """The device's name without the index of the current GPU: eight equal ranks share artifacts."""
    if device is None:
        return "cpu"
    if device.type == "cuda" and device.index == device_id:
        return "cuda:current"
    return str(device)


class Device(ArgumentType):
    """A torch.device; the current GPU without its index."""

    def token(self, value: Any, describer: Describer, depth: int) -> Token:
        return (self, value)

    def canonical(self, token: Token, device_id: int) -> Any:
        return Described(self.name, {"name": _placed(token[1], device_id)})


def _text(kind: type) -> Fields:
    """An object that counts by its text: a dtype, a layout."""
    return described(kind, str, "name")


def _sizes(size: Any) -> tuple[int, ...]:
    _check_sizes(size)
    return tuple(size)


def _dtype(kind: type) -> Fields:
    """A numpy.dtype, under one name for the classes of all versions of NumPy."""
    found = described(kind, _dtype_text, "name")
    found.name = "numpy.dtype"
    return found


def _dtype_text(dtype: Any) -> str:
    """``dtype.str`` where it is complete: it omits parts of structures, and of types that other libraries add."""
    return str(dtype.str if dtype.kind in "biufcmMOSU" and dtype.type.__module__ == "numpy" else dtype)


def _scalar(value: Any) -> list[Any]:
    item = value.item()
    if type(item) not in (bool, int, float, complex, str, bytes):
        item = str(value)  # long doubles, and times with their units
    return [_dtype_text(value.dtype), item]


def _tensor(kind: type) -> ArgumentType | None:
    """None for a subclass that redefines operations: its metadata do not identify it."""
    plain: Any = next(base for base in kind.__mro__ if qualified(base) == "torch.Tensor")
    subclass: Any = kind
    return Tensor(kind) if subclass.__torch_dispatch__ is plain.__torch_dispatch__ else None


def _parameters(signature: Any) -> list[Any]:
    return [(each.name, int(each.kind), each.default) for each in signature.parameters.values()]


def _ufunc(value: Any) -> str:
    """The name of one of NumPy's own; others may hold a Python function."""
    name = str(value.__name__)
    if vars(sys.modules["numpy"]).get(name) is not value:
        raise KeyFactorError(f"the ufunc {name} is not NumPy's own: call it in a function of yours")
    return name


def _repr(kind: type) -> Fields:
    return described(kind, repr, "text")


_BY_REPR = (
    *("datetime.date", "datetime.datetime", "datetime.time", "datetime.timedelta", "decimal.Decimal"),
    *("fractions.Fraction", "uuid.UUID", "operator.itemgetter"),
    *(
        "builtins.ellipsis",
        "types.GenericAlias",
        "types.UnionType",
        "typing.NewType",
        "typing.ParamSpec",
        "typing.TypeVar",
    ),
    "typing._Final",
)
"""Types of Python's library whose text tells all of a value."""

LIBRARY_TYPES: dict[str, Callable[[type], ArgumentType | None]] = {
    **{name: lambda kind: Fields(kind, ()) for name in ("_thread.lock", "_thread.RLock", "threading.Condition")},
    **dict.fromkeys(_BY_REPR, _repr),
    "builtins.bytearray": lambda kind: described(kind, bytes, "content"),
    "builtins.object": lambda kind: Fields(kind, ()) if kind is object else None,
    "collections.ChainMap": lambda kind: Fields(kind, ("maps",)),
    "string.Template": lambda kind: Fields(kind, ("template",)),
    "builtins.slice": lambda kind: Fields(kind, ("start", "stop", "step")),
    "numpy.ufunc": lambda kind: described(kind, _ufunc, "name"),
    "builtins.range": lambda kind: Fields(kind, ("start", "stop", "step")),
    "collections.OrderedDict": OrderedMapping,
    "collections.defaultdict": OrderedMapping,
    "inspect.Signature": lambda kind: described(kind, _parameters, "parameters"),
    "logging.Logger": lambda kind: Fields(kind, ("name",)),
    "re.Pattern": lambda kind: Fields(kind, ("pattern", "flags")),
    "torch.Tensor": _tensor,
    "torch._subclasses.fake_tensor.FakeTensor": Storageless,
    "torch._subclasses.functional_tensor.FunctionalTensor": Storageless,
    "torch.Size": lambda kind: described(kind, _sizes, "sizes"),
    "torch.device": Device,
    **{f"torch.{name}": _text for name in ("dtype", "layout", "memory_format", "qscheme")},
    "numpy.ndarray": Array,
    "numpy.dtype": _dtype,
    "numpy.generic": lambda kind: Fields(kind, ("dtype", "value"), read=_scalar),
    "triton.language.core.constexpr": lambda kind: Fields(kind, ("value",)),
    "triton.language.core.dtype": lambda kind: Fields(kind, ("name",)) if kind.__qualname__ == "dtype" else None,
    "triton.language.core.pointer_type": lambda kind: Fields(kind, ("element_ty", "address_space", "const")),
    "triton.language.core.block_type": lambda kind: Fields(kind, ("element_ty", "shape")),
    "triton.language.core.tuple": lambda kind: Fields(kind, ("values",)),
    "triton.runtime.jit.JITCallable": JitFunction,
    "triton.runtime.jit.JITFunction": JitFunction,  # before 3.5 it has no such base
}
"""Argument types by the qualified name of a class or a base; None: this subclass has no identity."""
