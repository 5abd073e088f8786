"""Builds answered by the backend: ``_jit_compile``, below torch's ``load`` and ``load_inline``, and FlashInfer's and tvm_ffi's
runs of ninja.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kcoord.backends.fail_open import notices
from kcoord.backends.ninja import directories, extensions
from kcoord.backends.ninja.adapter import backend
from kcoord.backends.registry import is_imported
from kcoord.backends.reliances import Part, unknown_argument
from kcoord.backends.wrapping import is_wrapped, wraps
from kcoord.files.atomic import replace_file

_LISTS = " ".join(f"{name}=" for name in extensions.LISTS)
_CPP = "utils.cpp_extension"
EXTENSIONS = Part("ninja", "torch", "extensions", {
    f"{_CPP}:IS_HIP_EXTENSION": "",
    f"{_CPP}:JIT_EXTENSION_VERSIONER.bump_version_if_changed": "self _ _ build_arguments= build_directory= with_cuda="
    " with_sycl= is_python_module= is_standalone=",
    f"{_CPP}:JIT_EXTENSION_VERSIONER.entries": "",
    f"{_CPP}:LIB_EXT": "",
    f"{_CPP}:_import_module_from_library": "_ _ _",
    f"{_CPP}:_is_cuda_file": "_",
    f"{_CPP}:_jit_compile": f"name= sources= {_LISTS} build_directory= verbose= with_cuda= with_sycl= is_python_module="
    " is_standalone= ...",
    f"{_CPP}:_maybe_write": "filename new_content",
    f"{_CPP}:_prepare_ldflags": "_ _ _ _ _",
    f"{_CPP}:_write_ninja_file_and_build_library": f"name= sources= {_LISTS} build_directory= verbose= with_cuda= with_sycl="
    " is_standalone=",
    f"{_CPP}:_write_ninja_file_to_build_library": f"path= name= sources= {_LISTS} with_cuda= with_sycl= is_standalone=",
})  # fmt: skip
FLASHINFER = Part("ninja", "flashinfer", "FlashInfer", {"jit.core:run_ninja": "workdir ninja_file ..."})
TVM_FFI = Part("ninja", "tvm_ffi", "tvm_ffi", {"cpp.extension:build_ninja": "build_dir ..."})


def hook() -> None:
    """Hook those that are imported. Idempotent."""
    if is_imported(f"torch.{_CPP}") and EXTENSIONS.holds():
        _hook_extensions(sys.modules[f"torch.{_CPP}"])
    for part, module, shared in ((FLASHINFER, "jit.core", _flashinfer), (TVM_FFI, "cpp.extension", _tvm_ffi)):
        if is_imported(f"{part.package}.{module}") and part.holds():
            part.wrap(next(iter(part.calls)), shared)


def _hook_extensions(cpp_extension: Any) -> None:
    native, native_write = cpp_extension._jit_compile, cpp_extension._maybe_write
    if is_wrapped(native):
        return
    known = {*EXTENSIONS.parameters(f"{_CPP}:_jit_compile"), "keep_intermediates"}
    signature = inspect.signature(native)

    @wraps(native)
    def jit_compile(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if other := unknown_argument(bound, known):
            notices.tell(f"{bound.arguments['name']} is built by each rank for itself: no key holds its {other}")
            return native(*args, **kwargs)
        bound.apply_defaults()
        given, versions = bound.arguments, cpp_extension.JIT_EXTENSION_VERSIONER.entries
        before = versions.get(given["name"])

        def compile() -> Any:
            versions.pop(given["name"], None)  # torch notes its next version itself
            if before is not None:
                versions[given["name"]] = before
            return native(*args, **kwargs)

        request = extensions.request_of(given)
        if request is None:
            return compile()
        files, place = extensions.loaded.get(request.name, ((), request.place))
        if files == request.inputs.files and (place / request.file).exists():
            return request.load_from(place)
        return backend.obtain(request, functools.partial(_from, request, compile))

    @wraps(native_write)
    def maybe_write(filename: str, new_content: str, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            native_write(filename, new_content, *args, **kwargs)
        else:
            _maybe_write(filename, new_content)

    cpp_extension._jit_compile, cpp_extension._maybe_write = jit_compile, maybe_write


def _from(request: extensions.Extension, compile: Callable[[], Any]) -> Any:
    """Build without kcoord, and note that the extension is in torch's own directory."""
    made = compile()
    extensions.loaded[request.name] = request.inputs.files, request.place
    return made


def _maybe_write(filename: str, new_content: str) -> None:
    """As torch's: ``load_inline``'s sources. Ranks that share the directory read the whole file or none."""
    path = Path(filename)
    if not path.exists() or path.read_text() != new_content:
        replace_file(path, new_content.encode())


def _flashinfer(native: Any) -> Callable[..., None]:
    @wraps(native)
    def run_ninja(workdir: Path, ninja_file: Path, *more: Any, **named: Any) -> None:
        def ninja(directory: Path, file: Path) -> None:
            native(directory, file, *more, **named)

        _build("flashinfer", Path(workdir), Path(ninja_file), ninja)

    return run_ninja


def _tvm_ffi(native: Any) -> Callable[..., None]:
    @wraps(native)
    def build_ninja(build_dir: str, *more: Any, **named: Any) -> None:
        def ninja(directory: Path, _: Path) -> None:
            native(str(directory), *more, **named)

        _build("tvm_ffi", Path(build_dir), Path(build_dir) / directories.NAME, ninja)

    return build_ninja


def _build(package: str, workdir: Path, file: Path, ninja: directories.Ninja) -> None:
    request = directories.request_of(package, workdir.resolve(), file.resolve(), ninja)
    if request is None:
        ninja(workdir, file)
    else:
        backend.obtain(request, lambda: ninja(workdir, file))
