"""The environment variables that change what a compiler generates, read live.

A key holds a whitelist of them: with all variables, the keys of any two ranks would differ. Each backend has its own list
(`Backend.variables`); here are the ones that toolchains have in common. The path of a tool is in no list, because
`kcoord.keys.tools.toolchain` keys the tool's content; a path of headers and libraries that nothing else keys is.

Not seen: a variable that C code sets without Python's knowledge (``setenv``, `os.putenv`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import MappingProxyType

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

TOOLCHAIN_VARIABLES = MappingProxyType({**_HOST_COMPILER, **_CUDA, **_ROCM})
"""The variables that host compilers, CUDA's and ROCm's tools read, and their effect."""


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
        """Bytes that are equal exactly when the same variables are set to the same values. `variables` decodes them."""
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
    """Names and values of the variables that are set, from `Environment.token`."""
    pairs = (os.fsdecode(pair).partition("=") for pair in token.split(b"\0") if pair)
    return {name: value for name, _, value in pairs}
