"""Compilers of other releases, each in a process of its own, whose answer is a line of JSON: what kcoord hooks, and what it says.

The compilers are those that are installed. ``removed``: each name that hooks rely on is removed in turn; the first answer is of
the release as it is. ``newer``: each function takes a further parameter, ``added``, and calls of the hooked ones give it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch._dynamo.backends.distributed
import torch._inductor.compile_fx
import torch.utils.cpp_extension
import triton
import tvm_ffi.cpp.extension

import kcoord.backends.triton.autotune  # whose hooks import it late
from kcoord.backends import reliances, trials
from kcoord.backends.inductor import compiles, moving
from kcoord.backends.inductor.request import UNIT
from kcoord.backends.registry import compilers, is_installed
from kcoord.backends.reliances import Part

for compiler in compilers():
    for name, hooks in compiler.modules.items():
        if is_installed(name):
            import_module(name)
            import_module(hooks)
PARTS = list({
    id(each): each
    for name, module in list(sys.modules.items()) if name.startswith("kcoord.backends.")
    for each in vars(module).values() if isinstance(each, Part) and each.package in sys.modules
    if each.name != "graphs of other GPUs" or moving.may_hook()  # of a torch for CUDA
}.values())  # fmt: skip
given: list[Any] = []
"""The values of ``added`` that natives got."""


def definer(part: Part, name: str) -> tuple[Any, str]:
    """The module, class or object whose own attribute `name` is."""
    owner, attribute = part.place(name)
    if attribute not in vars(owner):
        kind = owner if isinstance(owner, type) else type(owner)
        owner = next(each for each in kind.__mro__[:-1] if attribute in vars(each))  # not `object`
    return owner, attribute


def found(part: Part, name: str) -> Any:
    try:
        owner, attribute = definer(part, name)
    except (AttributeError, StopIteration):
        return None
    return vars(owner).get(attribute)


def answer(part: Part | None = None, name: str = "") -> dict[str, Any]:
    if part is not None:
        while found(part, name) is not None:  # of its bases, too
            delattr(*definer(part, name))
    names = [(each, other) for each in PARTS for other in each.calls]
    before = [found(*each) for each in names]
    kcoord.install()
    hooked = [each for each, native in zip(names, before, strict=True) if found(*each) is not native]
    return {
        "removed": None if part is None else [part.compiler, part.name, name],
        "hooked": [[each.compiler, each.name, other] for each, other in hooked],
        "figures": kcoord.connect().counters.read()["stood_aside"],
        "doctor": [told for each in compilers() for told in trials.parts_off(each.name)],
    }


def taking_more(native: Any, result: Any) -> Any:
    """`native`, a function, class method or static method, of a release in which it takes ``added``. It only returns `result`."""
    function = getattr(native, "__func__", native)
    signature = inspect.signature(function)
    added = inspect.Parameter("added", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = list(signature.parameters.values())
    last = len(parameters) - any(each.kind is each.VAR_KEYWORD for each in parameters)

    @functools.wraps(function)
    def newer(*args: Any, added: Any = None, **kwargs: Any) -> Any:
        given.append(added)
        return result

    del newer.__wrapped__  # type: ignore[attr-defined]
    newer.__signature__ = signature.replace(parameters=[*parameters[:last], added, *parameters[last:]])  # type: ignore[attr-defined]
    return type(native)(newer) if isinstance(native, (classmethod, staticmethod)) else newer


@dataclasses.dataclass
class Config:
    force_non_lazy_backward_lowering: bool = False


def newer() -> dict[str, Any]:
    """Of each call that gave ``added``: what the native got."""
    done = set()
    for part in PARTS:
        for name, call in part.calls.items():
            owner, attribute = definer(part, name)
            if call and (owner, attribute) not in done and inspect.isroutine(vars(owner)[attribute]):
                done.add((owner, attribute))
                result = ("entry", b"", {}) if attribute == "find_guarded_entry" else None
                setattr(owner, attribute, taking_more(vars(owner)[attribute], result))
    kcoord.install()
    got = {}
    for name, call in calls():
        del given[:]
        call(added=7)
        got[name] = list(given)
    return {"figures": kcoord.connect().counters.read()["stood_aside"], "given": got, "said": list(reliances.asides)}


def calls() -> Iterator[tuple[str, Callable[..., Any]]]:
    from torch._functorch._aot_autograd import autograd_cache, graph_compile
    from torch._inductor import codecache
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
    from torch._inductor.triton_bundler import TritonBundler
    from torch.compiler._cache import CacheArtifactManager

    node = types.SimpleNamespace(op="placeholder", target=None)
    tuner, partial = types.SimpleNamespace(), functools.partial
    lookup = ("key", True, None, lambda *_: True, [])
    yield "unit", partial(autograd_cache.AOTAutogradCache.find_guarded_entry, *lookup)
    yield "graph", partial(codecache.FxGraphCache.find_guarded_entry, *lookup)
    yield "check_node_safe", partial(autograd_cache.check_node_safe, node)
    yield "record_artifact", partial(CacheArtifactManager.record_artifact, "kind", "key", b"")
    yield "read_and_emit", partial(TritonBundler.read_and_emit, types.SimpleNamespace(kernel_artifacts=[]))
    of_backward = inspect.signature(graph_compile._aot_stage2b_bw_compile).parameters
    configs = (Config() if name == "aot_config" else None for name in of_backward if name != "added")
    backward = partial(graph_compile._aot_stage2b_bw_compile, *configs)
    yield "backward", backward
    compiles.leading = lambda: types.SimpleNamespace(kind=UNIT)  # type: ignore[assignment, return-value]
    yield "leader's backward", backward
    yield "run_node", partial(torch._dynamo.backends.distributed.SubmodCompiler.run_node, None, node)
    yield "wait", partial(AsyncCompile.wait, None, {})
    yield "autotune", partial(CoordescTuner.autotune, tuner, None, None)
    yield "worker", partial(codecache._worker_compile_cpp, "lock", [])
    extension = inspect.signature(torch.utils.cpp_extension._jit_compile).parameters
    yield "extension", partial(torch.utils.cpp_extension._jit_compile, **{n: "e" for n in extension if n != "added"})
    yield "_maybe_write", partial(torch.utils.cpp_extension._maybe_write, "file", "text")
    Path("build.ninja").write_text("subninja rules\n")  # so it is not shared
    yield "build_ninja", partial(tvm_ffi.cpp.extension.build_ninja, str(Path.cwd()))
    yield "_bench", partial(triton.runtime.autotuner.Autotuner._bench, tuner, config=None)
    tuner.cache_results = True
    yield "check_disk_cache", partial(triton.runtime.autotuner.Autotuner.check_disk_cache, tuner, (), [], lambda: None)
    if "tilelang" in sys.modules:
        yield from of_tilelang()
    if "ninetoothed" in sys.modules:
        Path("source.py").write_text("")
        yield "cache_source", partial(sys.modules["ninetoothed.generation"].cache_source, "")
        yield "import_from_path", partial(sys.modules["ninetoothed.jit"].import_from_path, "name", "source.py")


def of_tilelang() -> Iterator[tuple[str, Callable[..., Any]]]:
    from tilelang.autotuner.tuner import AutoTuner
    from tilelang.cache.kernel_cache import KernelCache

    tuner, partial = types.SimpleNamespace(), functools.partial
    yield "generate_cache_key", partial(AutoTuner.generate_cache_key, tuner)
    yield "_load_result_from_disk", partial(AutoTuner._load_result_from_disk, tuner, "key")
    yield "run", partial(AutoTuner.run, tuner)
    yield "_load_kernel_from_disk", partial(KernelCache._load_kernel_from_disk, None, "key", backend_context=None)


def in_a_fork(work: Callable[[], dict[str, Any]]) -> None:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            print(json.dumps(work()), flush=True)
        except Exception:  # noqa: BLE001 - the test fails for it
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    if sys.argv[1] == "newer":
        in_a_fork(newer)
    else:
        in_a_fork(answer)
        for part in PARTS:
            for name in part.calls:
                in_a_fork(functools.partial(answer, part, name))
