"""Torch and its compilers as after a first `torch.compile`, for a fork server: 6 s of CPU, and else of each process."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from contextlib import suppress

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
    os.environ[_name] = "1"  # no thread is lost at a fork
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # else Inductor compiles programs that try what the processor can do

for _name in (
    "sympy.combinatorics",
    "torch.utils.cpp_extension",
    "torch._inductor.compile_fx",
    "torch._inductor.choices",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.codegen.halide",
    "torch._inductor.codegen.mps",
    "torch._inductor.codegen.pallas",
    "torch._inductor.codegen.python_wrapper_mtia",
    "torch._inductor.codegen.wrapper_fxir",
    "torch._inductor.codegen.xpu.xpu_combined_scheduling",
    "torch._inductor.fx_passes.efficient_conv_bn_eval",
    "torch._inductor.fx_passes.fuse_attention",
    "torch._inductor.fx_passes.joint_graph",
    "torch._inductor.fx_passes.mkldnn_fusion",
    "torch._inductor.fx_passes.pad_mm",
    "torch._dynamo.backends.distributed",
    "torch._dynamo.repro.after_dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.export._trace",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.launcher.api",
    "kcoord.rank.coordinator",
    "kcoord_launch.torchrun",
    *(f"kcoord.backends.{name}.adapter" for name in ("cutedsl", "flydsl", "inductor", "ninetoothed", "ninja")),
    *(f"kcoord.backends.{name}.adapter" for name in ("tilelang", "triton")),
):
    with suppress(ModuleNotFoundError):  # not every release has each
        importlib.import_module(_name)

import torch  # noqa: E402
from torch._dynamo import guards  # noqa: E402
from torch._inductor.codecache import torch_key  # noqa: E402
from torch._inductor.cpu_vec_isa import pick_vec_isa  # noqa: E402
from torch._inductor.fx_passes import joint_graph, post_grad  # noqa: E402
from torch._inductor.runtime.triton_compat import triton_key  # noqa: E402
from torch.distributed.elastic.rendezvous import dynamic_rendezvous  # noqa: E402

from tests.support.forked import fork_agents, fork_ranks  # noqa: E402

del sys.modules["kcoord_launch.torchrun"]  # each torchrun runs it
# torch asks `inspect` for the name, which looks at each module for each frame: 0.4 s for a torchrun
dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
guards.profile_guard_manager = lambda *_: 0.0  # for a line of a log it empties the processor's cache, 50 ms a frame
torch_key()  # it hashes all files of torch
triton_key()  # torch knows where each release of Triton has it
with suppress(TypeError):  # an older torch names no device
    joint_graph.lazy_init(torch.device("cpu"))
    post_grad.lazy_init()
with tempfile.TemporaryDirectory() as _directory:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _directory
    pick_vec_isa()
    del os.environ["TORCHINDUCTOR_CACHE_DIR"]
fork_agents()
fork_ranks()
