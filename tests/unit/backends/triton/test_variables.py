"""Triton's variables: what changes a kernel is keyed, and nothing else."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kcoord.backends.triton.variables import VARIABLES

# Of Triton's own knobs, those that change no kernel.
_NEUTRAL = {
    "where files lie": {"TRITON_HOME", "TRITON_CACHE_DIR", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR"},
    "who caches": {
        "TRITON_CACHE_MANAGER", "TRITON_REMOTE_CACHE_BACKEND", "TRITON_REDIS_KEY_FORMAT", "TRITON_REDIS_HOST",
        "TRITON_REDIS_PORT", "TRITON_CACHE_AUTOTUNING", "TRITON_ALWAYS_COMPILE",
    },
    "kernels that are overridden are not shared": {"TRITON_KERNEL_OVERRIDE"},
    "what is printed or dumped": {
        "TRITON_KERNEL_DUMP", "TRITON_PRINT_AUTOTUNING", "TRITON_FRONT_END_DEBUGGING", "TRITON_DUMP_PTXAS_LOG",
    },
    "keyed by content": {
        "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_LIBDEVICE_PATH", "TRITON_HIP_LLD_PATH",
        "TRITON_AMD_CODEGEN_PATH",
    },
    "tools that only show": {"TRITON_CUOBJDUMP_PATH", "TRITON_NVDISASM_PATH"},
    "the launcher, not the kernel": {
        "CC", "TRITON_CUDACRT_PATH", "TRITON_CUDART_PATH", "TRITON_LIBCUDA_PATH", "TRITON_LIBHIP_PATH",
    },
    "nothing is compiled": {"TRITON_INTERPRET"},
}  # fmt: skip


def test_every_knob_of_triton_is_keyed_or_known_to_be_neutral() -> None:
    knobs = pytest.importorskip("triton.knobs")
    found = {
        descriptor.key
        for section in vars(knobs).values()
        if isinstance(section, knobs.base_knobs) and section is not knobs.proton
        for descriptor in section.knob_descriptors.values()
    }
    assert found - VARIABLES.keys() == found & set().union(*_NEUTRAL.values())


_PREFIXES = b"TRITON AMDGCN LLVM MLIR NVPTX PTXAS DISABLE ENABLE USE ALLOW STORE PREFER WARP".split()


def test_what_triton_itself_says_to_invalidate_its_cache_is_keyed() -> None:
    libtriton = pytest.importorskip("triton._C.libtriton")
    with Path(libtriton.__file__).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        texts = re.findall(rb"\0((?:%b)_\w{3,60})(?=\0)" % b"|".join(_PREFIXES), content)
    names = {text.decode() for text in texts} | VARIABLES.keys()
    program = (
        "import os, sys; os.environ.update(dict.fromkeys(sys.stdin.read().split(), '1'));"
        "[os.environ.pop(n, None) for n in ('TRITON_PLUGIN_PATHS', 'LLVM_PASS_PLUGIN_PATH')];"
        "import importlib.util as u; s = u.spec_from_file_location('libtriton', sys.argv[1]); m = u.module_from_spec(s);"
        "s.loader.exec_module(m); print(*m.get_cache_invalidating_env_vars())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(libtriton.__file__)],
        input=" ".join(names), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    listed = set(done.stdout.split())
    assert len(listed) >= 30
    assert listed <= VARIABLES.keys()
