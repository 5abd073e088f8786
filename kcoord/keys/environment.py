"""The environment variables that change what a compiler generates, read live.

A whitelist per backend, since a key that held everything would differ between any two ranks. The place of a tool
(``TRITON_PTXAS_PATH``) is not in it where `kcoord.keys.tools.toolchain` keys what lies there by its content; a place of headers
and libraries that nothing else keys is.

Not seen: a variable that C code sets behind Python's back (``setenv``, `os.putenv`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

_HOST_COMPILER = {
    "CC": "which C compiler runs, and with which flags",
    "CXX": "which C++ compiler runs, and with which flags",
    "CFLAGS": "flags of C compiles",
    "CXXFLAGS": "flags of C++ compiles",
    "CPPFLAGS": "flags of the preprocessor",
    "LDFLAGS": "flags of links",
    "CPATH": "where gcc and clang look for headers first",
    "C_INCLUDE_PATH": "where they look for C headers",
    "CPLUS_INCLUDE_PATH": "where they look for C++ headers",
    "LIBRARY_PATH": "where they look for libraries to link",
    "COMPILER_PATH": "where gcc looks for its own passes",
    "GCC_EXEC_PREFIX": "where gcc looks for its own passes",
    "CCC_OVERRIDE_OPTIONS": "clang edits its command line by it",
    "SOURCE_DATE_EPOCH": "the value of __DATE__ and __TIME__",
}

_CUDA = {
    "CUDA_HOME": "which CUDA's headers and libraries",
    "CUDA_PATH": "which CUDA's headers and libraries",
    "NVCC_PREPEND_FLAGS": "nvcc puts them before its arguments",
    "NVCC_APPEND_FLAGS": "nvcc puts them after its arguments",
    "NVCC_CCBIN": "nvcc's host compiler",
    "CUDACXX": "which CUDA compiler CMake and Inductor run",
    "CUDAFLAGS": "flags of CUDA compiles",
    "CUDAHOSTCXX": "the host compiler of CUDA compiles",
    "CUDAARCHS": "CMake's architectures",
    "PYTORCH_NVCC": "the nvcc, and a wrapper, of torch's extensions",
    "TORCH_CUDA_ARCH_LIST": "the architectures of torch's extensions",
}

_ROCM = {
    "ARCH": "the architecture of FlyDSL and of many a Makefile",
    "HIPCC_COMPILE_FLAGS_APPEND": "hipcc puts them after its arguments",
    "HIPCC_LINK_FLAGS_APPEND": "hipcc puts them after its arguments to link",
    "HIPFLAGS": "flags of HIP compiles",
    "HIP_CLANG_PATH": "which clang hipcc runs",
    "HIP_DEVICE_LIB_PATH": "the device libraries that are linked",
    "HIP_PATH": "which ROCm's headers and libraries",
    "HIP_PLATFORM": "whether hipcc compiles for AMD or NVIDIA",
    "HSA_OVERRIDE_GFX_VERSION": "the architecture that the device claims to be",
    "PYTORCH_ROCM_ARCH": "the architectures of torch's extensions",
    "ROCM_HOME": "which ROCm's headers and libraries",
    "ROCM_PATH": "which ROCm's headers and libraries",
}

_PYTHON = {**_HOST_COMPILER, **_CUDA, **_ROCM}

_TRITON = {
    # What Triton 3.4 ... 3.9 put into their own keys (include/triton/Tools/Sys/GetEnv.hpp).
    "ALLOW_LHS_TMEM_LAYOUT_CONVERSION": "layouts in tensor memory",
    "AMDGCN_ENABLE_DUMP": "in Triton's own key",
    "AMDGCN_USE_BUFFER_ATOMICS": "buffer atomics on AMD",
    "AMDGCN_USE_BUFFER_OPS": "buffer loads and stores on AMD",
    "DISABLE_FAST_REDUCTION": "how reductions are lowered (3.4)",
    "DISABLE_LLVM_OPT": "LLVM's passes, all or some",
    "DISABLE_MMA_V3": "no Hopper MMA",
    "DISABLE_MMA_V5": "no Blackwell MMA",
    "DISABLE_PTXAS_OPT": "ptxas' optimization level",
    "LLVM_ENABLE_TIMING": "in Triton's own key",
    "LLVM_EXTRACT_DI_LOCAL_VARIABLES": "debug information, and passes left out for it",
    "LLVM_IR_ENABLE_DUMP": "in Triton's own key",
    "LLVM_PASS_PLUGIN_PATH": "LLVM passes from a library",
    "MLIR_DISABLE_MULTITHREADING": "in Triton's own key",
    "MLIR_DUMP_PATH": "in Triton's own key",
    "MLIR_ENABLE_DIAGNOSTICS": "in Triton's own key",
    "MLIR_ENABLE_DUMP": "in Triton's own key",
    "MLIR_ENABLE_TIMING": "in Triton's own key",
    "NVPTX_ENABLE_DUMP": "in Triton's own key",
    "STORE_TMEM_TO_GLOBAL_BYPASS_SMEM": "how tensor memory is stored (3.4)",
    "TRITON_CONSAN_INIT_ALLOCATIONS": "instrumentation",
    "TRITON_DEFAULT_FP_FUSION": "whether a * b + c is fused",
    "TRITON_DISABLE_LINE_INFO": "line information in the code",
    "TRITON_DISABLE_RESHAPE_ENCODING_INFERENCE": "layouts of reshapes (3.4)",
    "TRITON_DUMP_MIR": "how AMD code is generated, in order to dump it",
    "TRITON_ENABLE_ASAN": "instrumentation",
    "TRITON_ENABLE_EXPERIMENTAL_CONSAN": "instrumentation",
    "TRITON_ENABLE_LLVM_DEBUG": "in Triton's own key",
    "TRITON_F32_DEFAULT": "the precision of float32 dots",
    "TRITON_FORCE_DISABLE_FP_FUSION": "whether a * b + c is fused",
    "TRITON_HIP_GLOBAL_PREFETCH": "AMD's pipelining (to 3.5)",
    "TRITON_HIP_LOCAL_PREFETCH": "AMD's pipelining (to 3.5)",
    "TRITON_HIP_USE_ASYNC_COPY": "AMD's pipelining",
    "TRITON_HIP_USE_BLOCK_PINGPONG": "AMD's scheduling",
    "TRITON_HIP_USE_COEXEC_SCHEDULER": "AMD's scheduling",
    "TRITON_HIP_USE_EXPERT_SCHEDULING": "AMD's scheduling",
    "TRITON_HIP_USE_IN_THREAD_TRANSPOSE": "AMD's layouts",
    "TRITON_LLVM_DEBUG_ONLY": "in Triton's own key",
    "TRITON_OVERRIDE_ARCH": "the architecture that code is generated for",
    "TRITON_PARTITION_SCHEDULING_DUMP_DATA_ONLY": "in Triton's own key",
    "TRITON_PARTITION_SCHEDULING_DUMP_LOOP_ONLY": "in Triton's own key",
    "TRITON_PARTITION_SCHEDULING_ENABLE_DUMP_DOT": "in Triton's own key",
    "TRITON_PLUGIN_VERSION_CHECK": "which plug-ins are loaded",
    "TRITON_PREFER_TMEM_16x256_LAYOUT": "layouts in tensor memory (to 3.7)",
    "USE_IR_LOC": "line information taken from the IR",
    # What they leave out, and changes code or the files of a kernel all the same (triton/knobs.py).
    "AMDGCN_ANALYZE_SMALL_TENSOR_RANGE": "which AMD loads become buffer loads",
    "AMDGCN_SCALARIZE_PACKED_FOPS": "packed arithmetic on AMD",
    "NVCC_APPEND_FLAGS": "as for nvcc, which extensions of Triton run",
    "NVCC_PREPEND_FLAGS": "as for nvcc, which extensions of Triton run",
    "PTXAS_OPTIONS": "flags of ptxas",
    "TRITON_ALLOW_NON_CONSTEXPR_GLOBALS": "whether a kernel may bake a global in",
    "TRITON_DEBUG": "device asserts, overflow checks",
    "TRITON_FPSAN_HOMOMORPHIC_CASTS": "instrumentation",
    "TRITON_INSTRUMENTATION_MODE": "instrumentation",
    "TRITON_MOCK_PTX_VERSION": "the PTX version that code is generated for",
    "TRITON_PLUGIN_PATHS": "passes from libraries",
    "TRITON_STORE_BINARY_ONLY": "which of a kernel's files are stored",
    "TRITON_SWAP_MIR": "AMD machine code from files in its place",
    "TRITON_SWAP_MIR_ENABLE_MISCHED": "the scheduler of those",
}

_INDUCTOR = {
    # Inductor's own configuration is in Inductor's own key; these are read past it.
    "ATEN_CPU_CAPABILITY": "the vector instructions of CPU code",
    "OMP_PREFIX": "which OpenMP is linked",
    "TORCHINDUCTOR_DEBUG_COMPILE": "optimization level of C++ code",
    "TORCHINDUCTOR_DEBUG_SYMBOL": "debug information of C++ code",
    "TORCHINDUCTOR_PATTERN_MATCH_BACKEND": "which patterns are replaced",
    "TORCHINDUCTOR_XPU_KERNEL_FORMAT": "the binary format on XPU",
    "TRITON_USE_META_WS": "warp specialization of templates",
}

_CPP = {
    "TORCH_XPU_ARCH_LIST": "the architectures of torch's extensions",
}

_TILELANG = {
    "TILELANG_CUTEDSL_HOST_LAUNCHER": "the host code of CuTe DSL kernels",
    "TILELANG_CUTEDSL_REQUIRE_CUTLASS_HOST": "the host code of CuTe DSL kernels",
    "TILELANG_CUTEDSL_REQUIRE_TVMFFI": "the host code of CuTe DSL kernels",
    "TILELANG_DEFAULT_TARGET": "what code is generated for",
    "TILELANG_ENABLE_DATA_RACE_CHECK": "passes that are run",
    "TILELANG_ENABLE_IR_SPAN": "source positions in the IR",
    "TILELANG_EXECUTION_BACKEND": "the host code of a kernel",
    "TILELANG_LAYOUT_COST_MODEL": "which layouts are chosen",
    "TVM_CUDA_COMPILE_MODE": "nvcc or NVRTC",
}

_FLYDSL = {
    "FLYDSL_COMPILE_BACKEND": "what code is generated for",
    "FLYDSL_COMPILE_LLVM_DIR": "the LLVM that generates code",
    "FLYDSL_COMPILE_OPT_LEVEL": "optimization level",
    "FLYDSL_DEBUG_ENABLE_DEBUG_INFO": "debug information",
    "FLYDSL_DEBUG_MAX_LOC_DEPTH": "source positions in the code",
    "FLYDSL_EXTRA_SOURCE_DIRS": "in FlyDSL's own key",
    "FLYDSL_GPU_ARCH": "the architecture that code is generated for",
    "FLYDSL_KTRACE_BLOCKS": "instrumentation",
    "FLYDSL_KTRACE_BUFFER_BYTES": "instrumentation",
    "FLYDSL_KTRACE_ENABLE": "instrumentation",
    "FLYDSL_RUNTIME_KIND": "the host code of a kernel",
    "LLVM_GFX1250_ANY_XNACK_CODEGEN": "gfx1250 code",
}

REASONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "python": _PYTHON,
        "triton": _TRITON,
        "inductor": {**_PYTHON, **_TRITON, **_INDUCTOR},
        "cpp": {**_PYTHON, **_CPP},
        "tilelang": {**_PYTHON, **_TILELANG},
        "ninetoothed": {**_PYTHON, **_TRITON},
        "flydsl": {**_PYTHON, **_FLYDSL},
    }
)
"""Why a variable is in a backend's key. ``python`` is the generic API."""

VARIABLES: Mapping[str, frozenset[str]] = MappingProxyType({name: frozenset(why) for name, why in REASONS.items()})
"""The variables that change what a backend generates."""


class Environment:
    """Some variables of this process, read live.

    Thread-safe without a lock. A look at an unchanged environment compares it as a whole: 0.3 µs for 35 variables, since
    dictionaries that hold the same objects are compared by identity.
    """

    __slots__ = ("_encoded", "_last", "_names")

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(sorted(set(names)))
        self._encoded = tuple(map(os.fsencode, self._names))
        self._last: tuple[dict[bytes, bytes], bytes] | None = None  # replaced as one: what was there, and its token

    def token(self) -> bytes:
        """Bytes that are equal exactly when the variables are: what is set, and to what. `variables` reads them."""
        environ = os.environ
        data = getattr(environ, "_data", None) if type(environ) is os._Environ else None
        if type(data) is not dict:  # somebody put another mapping there, or Python changed
            set_ = [(encoded, environ.get(name)) for encoded, name in zip(self._encoded, self._names, strict=True)]
            return b"\0".join(b"%b=%b" % (name, os.fsencode(value)) for name, value in set_ if value is not None)
        last = self._last
        if last is not None and last[0] == data:
            return last[1]
        data = data.copy()  # other threads go on setting variables; what follows is of one moment
        token = b"\0".join(b"%b=%b" % (name, data[name]) for name in self._encoded if name in data)
        self._last = data, token
        return token

    def read(self) -> dict[str, str]:
        """The variables that are set, and their values."""
        return variables(self.token())


def variables(token: bytes) -> dict[str, str]:
    """What `Environment.token` stands for: names and values of the variables that are set."""
    pairs = (os.fsdecode(pair).partition("=") for pair in token.split(b"\0") if pair)
    return {name: value for name, _, value in pairs}


def environment_factors(token: bytes) -> dict[str, Any]:
    """What enters a key. Only what is set: a difference reads ``env PTXAS_OPTIONS: unset → -O1``."""
    return {"env": variables(token)}
