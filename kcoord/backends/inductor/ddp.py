"""Units of one Dynamo graph, which DDPOptimizer splits along the gradients' buckets: ranks compile different ones at once.

A rank passes over a unit that another rank is compiling, traces the next one, and joins the unit at its first call. All ranks
take the inputs of the next unit from an eager run on fake tensors, whether they compiled the unit or not: so their keys agree. A
unit thereby promises the strides of its outputs, which its first call checks.

Torch bypasses AOTAutograd's cache here, because its hits return no fake outputs; none are asked for.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback
from torch._dynamo.utils import counters, dynamo_timed, get_metrics_context
from torch._functorch import config as functorch
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._inductor import config as inductor

from kcoord.backends.fail_open import fails_open
from kcoord.backends.inductor import compiles, conditions
from kcoord.backends.inductor.request import UNIT

Compile = Callable[..., Callable[..., Any]]


def made(native: Callable[..., None], self: Any, module: Any, compiler: Compile, *args: Any, **kwargs: Any) -> None:
    """As ``SubmodCompiler.__init__``."""
    native(self, module, compiler, *args, **kwargs)
    if not torch._dynamo.config.suppress_errors:  # an error that comes late cannot be suppressed
        self.compiler = lambda *a, **k: _compiled(compiler, *a, **k)


def run_node(native: Callable[..., Any], self: Any, n: Any, *args: Any, **kwargs: Any) -> Any:
    """As ``SubmodCompiler.run_node``, which returns the unit's fake outputs."""
    outputs = native(self, n, *args, **kwargs)
    unit = getattr(self.module.get_submodule(n.target), "submod", None) if n.op == "call_module" else None
    if isinstance(unit, _Unit):
        unit.promises = [tuple(t.stride()) if isinstance(t, torch.Tensor) else None for t in _flat(outputs)]
    return outputs


def _compiled(compiler: Compile, graph: Any, args: Sequence[Any], **configs: Any) -> Callable[..., Any]:
    if not _may_pass_over(graph, args):
        return compiler(graph, args, **configs)
    before = counters["aot_autograd"]["total"]
    unit = _Unit(compiler, graph, args, configs)
    unit.compile(waits=False)
    counters["aot_autograd"]["total"] = before  # DDPOptimizer then runs the graph itself for the next inputs
    return unit


@fails_open(lambda graph, args: False)
def _may_pass_over(graph: Any, args: Sequence[Any]) -> bool:
    """True for a unit that is shared and whose sizes are numbers: guards of symbolic ones would come too late."""
    symbolic = any(isinstance(size, torch.SymInt) for a in args if isinstance(a, torch.Tensor) for size in a.shape)
    plain = all(isinstance(a, torch.Tensor) for a in args)
    return plain and not symbolic and TracingContext.try_get() is not None and not conditions.problem(UNIT, graph, args)


class _Unit:
    """One compiled unit, or one that is joined when it is called."""

    def __init__(self, compiler: Compile, graph: Any, args: Sequence[Any], configs: dict[str, Any]) -> None:
        self._task: tuple[Compile, Any, Sequence[Any], dict[str, Any]] | None = (compiler, graph, args, configs)
        self._compiled: Callable[..., Any] | None = None
        self._lock = threading.RLock()
        self._compile_context = CompileContext.try_get()
        self._context = copy.copy(TracingContext.get())
        self._context.fakify_first_call = False
        self._context.ddp_optimizer_ctx = None  # the unit's alone: a later backward finds its metadata here
        self._surroundings: _Surroundings | None = None  # of a unit that was passed over
        self.promises: list[tuple[int, ...] | None] | None = None
        self._keeps_promises: bool | None = None

    def compile(self, waits: bool) -> None:
        assert self._task is not None
        compiler, graph, args, configs = self._task
        try:
            with tracing(self._context), compiles.passing_over("" if waits else UNIT):
                self._compiled = compiler(graph, args, **configs)
        except compiles.Passed:
            self._surroundings = _Surroundings()
            return
        finally:
            compiles.unmark(args)
        self._task = self._surroundings = None

    def __call__(self, *args: Any) -> Any:
        if self._compiled is None:
            self._join()
        assert self._compiled is not None
        outputs = self._compiled(*args)
        if self._keeps_promises is None:
            self._keeps_promises = self.promises is None or [_stride(t) for t in _flat(outputs)] == list(self.promises)
        return outputs if self._keeps_promises else restrided(outputs, self.promises or ())

    def _join(self) -> None:
        """Load the unit, or compile it if nobody else does. Raises what Dynamo would have raised earlier."""
        with self._lock:
            if self._compiled is not None or self._surroundings is None:
                return
            with (
                self._surroundings.restored(),
                compile_context(self._compile_context),
                get_metrics_context(),
                dynamo_timed("kcoord.join", log_pt2_compile_event=True),  # torch logs a compile's events inside one
            ):
                try:
                    self.compile(waits=True)
                except ShortenTraceback:
                    raise
                except Exception as error:  # noqa: BLE001 - as Dynamo wraps it
                    raise BackendCompilerFailed(self.compile, error, None).with_traceback(error.__traceback__) from None


def restrided(outputs: Any, promises: Sequence[tuple[int, ...] | None]) -> Any:
    """`outputs`, with copies of those whose strides differ from what the next unit was promised. Gradients pass through."""
    found = []
    for each, strides in zip(_flat(outputs), promises, strict=True):
        if strides is not None and _stride(each) != strides:
            each = torch.empty_strided(each.shape, strides, dtype=each.dtype, device=each.device).copy_(each)
        found.append(each)
    return type(outputs)(found) if isinstance(outputs, (tuple, list)) else found[0]


class _Surroundings:
    """Torch's settings and modes around a compile."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._configs = [(config, config.get_config_copy()) for config in (inductor, functorch)]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for config, saved in self._configs:
                now = config.get_config_copy()
                stack.enter_context(config.patch({n: v for n, v in saved.items() if n in now and now[n] is not v}))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            yield


def _flat(outputs: Any) -> Sequence[Any]:
    return outputs if isinstance(outputs, (tuple, list)) else (outputs,)


def _stride(value: Any) -> tuple[int, ...] | None:
    return tuple(value.stride()) if isinstance(value, torch.Tensor) else None
