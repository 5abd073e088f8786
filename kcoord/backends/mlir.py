"""Compilers on MLIR, answered at their pass manager: a traced module goes in, and the compiled one comes out, in its place.

`PassManager.parse` and `PassManager.run` are MLIR's own, and the same in all releases. So an adapter knows nothing of its
compiler's Python: a request is a module and a pipeline, and its key holds all that tracing has read. The pipeline is the text
that was parsed: ``str(manager)`` has it expanded, and leaves out options that passes are constructed with.
"""

from __future__ import annotations

import io
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.backends.backend import Backend
from kcoord.backends.fail_open import coordinator_in_use, fails_open, notices
from kcoord.backends.wrapping import is_wrapped, wraps
from kcoord.interruption import let_through
from kcoord.keys.device import DeviceKey, GPUTarget, Scope

_COMPILED = "module.mlirbc"
_CODE = "code-{}.elf"  # the header of each piece of GPU code, which names the GPU
_LONGEST_NAME = 80  # characters; CuTe DSL's names list the types of all arguments
_ELF = b"\x7fELF\x02\x01"
_HEADER = 64  # bytes
_MACHINE = slice(18, 20)
_GPUS = (b"\xbe\x00", b"\xe0\x00")  # CUDA, AMDGPU


CALLS = {"_mlir.passmanager:PassManager.parse": "", "_mlir.passmanager:PassManager.run": ""}
"""Names of a binding, in C++ and so without signatures, below the package of its compiler."""


class Passes:
    """Runs the passes, which change the module in place, and so at most once."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run, self.is_done = run, False

    def __call__(self) -> None:
        if not self.is_done:
            self._run()
            self.is_done = True


@dataclass(frozen=True)
class Traced:
    """A traced module, which a compile or a load turns into the compiled one, in place.

    `name` is that of the host's function. `pipeline` is the passes with all options, and `ir` the text that they read: with
    source lines if these are compiled into the code.
    """

    operation: Any = field(repr=False)
    name: str
    ir: str = field(repr=False)
    pipeline: str
    compile: Passes = field(repr=False)


class MLIRBackend(Backend[Traced, Any]):
    """The handle is the caller's own module, of the MLIR context that asks."""

    scope = Scope.TARGET
    keeps_handles = False  # each belongs to the context of one compile; the compiler keeps what it makes of them

    @abstractmethod
    def makes_code(self, pipeline: str) -> bool:
        """False for other passes than those that make GPU code: those of a dump."""

    @abstractmethod
    def keeps_lines(self, pipeline: str) -> bool:
        """True if the code may name files and lines of the source."""

    @abstractmethod
    def reason_not_shared(self, request: Traced) -> str:
        """The reason why `request` must not be shared; empty if it may be."""

    @abstractmethod
    def target_of(self, pipeline: str) -> GPUTarget | None:
        """The GPU that code is generated for; None if the pipeline names none."""

    def bypass(self, request: Traced) -> str:
        reason = self.reason_not_shared(request)
        if reason:
            notices.tell(f"{self.label(request)} is compiled by each rank for itself: {reason}", about=reason)
        return reason

    def label(self, request: Traced) -> str:
        return request.name

    def target(self, request: Traced) -> GPUTarget | None:
        return self.target_of(request.pipeline)

    def device(self, request: Traced) -> DeviceKey | None:
        return (
            None  # the pipeline names the GPU; a process that only compiles does not open its own, and may fork later
        )

    def compile(self, request: Traced, staging: Path) -> Any:
        request.compile()
        for name, content in _files(request.operation).items():
            (staging / name).write_bytes(content)
        return request.operation

    def required(self, request: Traced) -> tuple[str, ...]:
        return (_COMPILED,)

    def load(self, request: Traced, artifact: Artifact) -> Any:
        return fill(request.operation, (artifact.path / _COMPILED).read_bytes())


class _Parsed(threading.local):
    """The manager that this thread has parsed last, the text that it was parsed from, and its own text at that moment."""

    manager: Any = None
    pipeline = own = ""


_parsed = _Parsed()


def hook(manager: Any, backend: MLIRBackend) -> None:
    """Let `backend` answer the pass `manager`, a class. Idempotent."""
    native, native_parse = manager.run, manager.parse
    if is_wrapped(native):
        return

    @wraps(native_parse)
    def parse(pipeline: str, *args: Any, **kwargs: Any) -> Any:
        found = native_parse(pipeline, *args, **kwargs)
        _parsed.manager, _parsed.pipeline, _parsed.own = found, pipeline, str(found)
        return found

    @wraps(native)
    def run(self: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        def natively() -> Any:
            return native(self, operation, *args, **kwargs)

        request = _request(backend, self, operation, natively)
        if request is None:
            return natively()
        try:
            backend.obtain(request, request.compile)
        except OSError as error:
            let_through(error)
            if not request.compile.is_done:
                raise
            # the disk refused the artifact: this rank has its module
        return None

    manager.run, manager.parse = run, staticmethod(parse)


@fails_open(lambda *arguments: None)
def _request(backend: MLIRBackend, manager: Any, operation: Any, natively: Callable[[], object]) -> Traced | None:
    """None if kcoord is off, if these passes make no GPU code, or if they were not parsed as they are."""
    parsed, _parsed.manager = _parsed.manager, None  # kept, it would keep its MLIR context, and the code in it
    pipeline = _parsed.pipeline
    if parsed is not manager or _parsed.own != str(manager):
        return None
    if operation.name != "builtin.module" or not backend.makes_code(pipeline) or coordinator_in_use() is None:
        return None
    ir = str(operation.get_asm(print_generic_op_form=True, enable_debug_info=backend.keeps_lines(pipeline)))
    return Traced(operation, symbol(operation)[:_LONGEST_NAME], ir, pipeline, Passes(natively))


# Modules, by the classes of each compiler's own binding.


def symbol(operation: Any) -> str:
    """The name of the host's function; ``module`` if there is none."""
    functions = (each for each in _operations(operation) if each.name == "func.func")
    return next((str(each.attributes["sym_name"]).strip('"') for each in functions), "module")


@fails_open(lambda operation: {})
def _files(operation: Any) -> Mapping[str, bytes]:
    """The artifact's files, by name. None at all, and then nothing is published, if the module cannot be written."""
    buffer = io.BytesIO()
    operation.write_bytecode(buffer)
    content = buffer.getvalue()
    return {_COMPILED: content, **{_CODE.format(n): header for n, header in enumerate(_headers(content))}}


def _headers(content: bytes) -> Iterator[bytes]:
    """The ELF header of each piece of GPU code in a module's bytecode."""
    at = content.find(_ELF)
    while at >= 0:
        header = content[at : at + _HEADER]
        if header[_MACHINE] in _GPUS:
            yield header
        at = content.find(_ELF, at + 1)


def fill(operation: Any, content: bytes) -> Any:
    """Make `operation`, a module's, the one of the bytecode `content`, as passes would. Raises before it changes anything."""
    module = sys.modules[type(operation).__module__].Module
    compiled = module.parse(content, context=operation.context)
    for name in _names(operation):
        del operation.attributes[name]
    for name in _names(compiled.operation):
        operation.attributes[name] = compiled.operation.attributes[name]
    forget = getattr(
        operation.context, "_clear_live_operations_inside", None
    )  # of older bindings, as a pass manager does
    if forget is not None:
        forget(operation)
    for each in reversed(_operations(operation)):
        each.erase()
    body = _body(operation)
    for each in _operations(compiled.operation):
        each.detach_from_parent()
        body.append(each)
    return operation


def _body(operation: Any) -> Any:
    return operation.regions[0].blocks[0]


def _operations(operation: Any) -> list[Any]:
    return [each.operation for each in _body(operation).operations]


def _names(operation: Any) -> list[str]:
    attributes = operation.attributes
    return [attributes[index].name for index in range(len(attributes))]
