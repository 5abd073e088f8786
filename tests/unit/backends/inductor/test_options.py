"""Each option of the installed torch is in a key, or is known here with the reason why it need not be.

An option that nobody knows fails a test on the day that a release brings it. Is it in none of torch's keys? If it changes what a
compile makes, it belongs into `kcoord.backends.inductor.ambient`; if ranks may talk under it, into `conditions`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config

from kcoord.backends.inductor import conditions

_INDUCTOR = {
    # refused, if set: `conditions`
    **dict.fromkeys(conditions._CUSTOM["torch._inductor.config"], "a compile with it is not shared"),
    # where and how a compile runs, or what it writes beside the code
    "compile_threads": "the number of workers",
    "worker_start_method": "how workers start",
    "compile_worker_mode": "processes, or threads in a Python without a GIL",
    "compile_worker_watchdog_interval_seconds": "how often a worker that works for long is reported",
    "trace": "files for people to read",
    "fx_graph_cache": "whether torch's own cache answers; kcoord is asked through it",
    "fx_graph_remote_cache": "whether a remote one does",
    "autotune_local_cache": "whether choices are kept; they are no artifacts",
    "autotune_remote_cache": "whether choices are kept elsewhere",
    "force_disable_caches": "with it torch looks nothing up, and kcoord is not asked",
    "bundle_triton_into_fx_graph_cache": "whether an entry holds its kernels",
    # how code is started once it is loaded
    "cudagraph_policy": "applied when an entry is loaded",
    "force_disable_cudagraph_TESTING_ONLY": "applied when an entry is loaded",
    "use_static_triton_launcher": "how a kernel is launched; torch answers for an entry with the other kind",
    "strict_static_triton_launcher": "whether a kernel without such a launcher is an error",
    "always_complex_memory_overlap_TESTING_ONLY": "of torch's own tests",
    # inputs whose effect is in the graph
    "pre_grad_pass_timing": "early: its effect is in the graph; late: torch's key holds the pass",
    "_fuse_ddp_communication_passes": "torch's key holds each of them, apart from the other options",
    # names of other options, which are in torch's key
    "benchmark_epilogue_fusion": "benchmark_template_fusion",
    "max_epilogue_benchmarked_choices": "max_template_fusion_benchmarked_choices",
    # paths
    "cuda.cutlass_dir": "CUTLASS' place; its release belongs to an installation, as ptxas' does",
    "cutlass.cutlass_dir": "the same",
    "xpu.cutlass_dir": "the same",
}  # fmt: skip
_FUNCTORCH = {
    **dict.fromkeys(conditions._CUSTOM["torch._functorch.config"], "a compile with it is not shared"),
    "activation_memory_budget_runtime_estimator": "torch's key holds its uuid; without one torch keeps nothing",
    "activation_memory_budget_solver": "torch's key holds its uuid; without one torch keeps nothing",
}
_BELOW_DYNAMO = {
    "caching_precompile": "how an entry is kept; it is in torch's key",
    "debug_dir_root": "files for people to read",
    "force_compile_during_fx_trace": "whether a call that is being traced is compiled at all",
    "strict_precompile": "whether a miss is an error",
    "suppress_errors": "what follows a failure; kcoord passes over nothing under it",
    "record_runtime_overhead": "a measurement",
    "inline_inbuilt_nn_modules": "which inputs a CUDA graph copies, when it is recorded",
    "skip_fsdp_hooks": "whether Dynamo traces FSDP1's hooks; what it traces is in the graph",
    "use_lazy_graph_module": "when a graph's Python is made",
}
"""Options of Dynamo that AOTAutograd or Inductor reads. The graph holds what all others do."""
_READ = re.compile(r"(?:_dynamo\.config|dynamo_config)\.(\w+)")


def test_each_option_of_inductor_is_in_torchs_key_or_known() -> None:
    config: Any = torch._inductor.config
    left_out = set(_options(config)) - set(config.save_config_portable(ignore_private_configs=False))
    assert {name for name in left_out if not {name, name.partition(".")[0]} & set(_INDUCTOR)} == set()


def test_each_option_of_functorch_is_in_torchs_key_or_known() -> None:
    """An AOT key holds all that torch saves."""
    config: Any = torch._functorch.config
    saved = set(config.get_config_copy()) - set(config._save_config_ignore)
    assert set(_options(config)) - saved - set(_FUNCTORCH) == set()


def test_each_option_of_dynamo_that_works_below_the_graph_is_known() -> None:
    assert set(_read_below_dynamo()) - set(_BELOW_DYNAMO) == set()


def _options(config: Any) -> Iterator[str]:
    return (name for name in config._config if not name.startswith(("_save_config_ignore", "_cache_config_")))


def _read_below_dynamo() -> Iterator[str]:
    for package in ("_functorch", "_inductor"):
        for file in Path(torch.__file__).parent.joinpath(package).rglob("*.py"):
            yield from _READ.findall(file.read_text())
