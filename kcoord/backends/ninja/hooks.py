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

from kcoord.backends.fail_open import fails_open, notices
from kcoord.backends.ninja import directories, extensions
from kcoord.backends.ninja.adapter import backend
from kcoord.backends.wrapping import differing, is_wrapped, wraps
from kcoord.files.atomic import replace_file

_FLAGS = " ".join(extensions.LISTS)
_NEEDED = {
    "utils.cpp_extension:JIT_EXTENSION_VERSIONER": "",
    "utils.cpp_extension:LIB_EXT": "",
    "utils.cpp_extension:_import_module_from_library": "module_name path is_python_module",
    "utils.cpp_extension:_jit_compile": f"name sources {_FLAGS} build_directory verbose with_cuda with_sycl is_python_module"
    " is_standalone keep_intermediates",
    "utils.cpp_extension:_maybe_write": "filename new_content",
    "utils.cpp_extension:_prepare_ldflags": "extra_ldflags with_cuda with_sycl verbose is_standalone",
    "utils.cpp_extension:_write_ninja_file_and_build_library": f"name sources {_FLAGS} build_directory verbose with_cuda"
    " with_sycl is_standalone",
    "utils.cpp_extension:_write_ninja_file_to_build_library": f"path name sources {_FLAGS} with_cuda with_sycl is_standalone",
}
"""The names of torch's that are used, and the parameters of functions."""


def hook() -> None:
    """Hook those that are imported. Idempotent."""
    if "torch.utils.cpp_extension" in sys.modules:
        _hook_extensions(sys.modules["torch.utils.cpp_extension"])
    for module, name in (("flashinfer.jit.core", "run_ninja"), ("tvm_ffi.cpp.extension", "build_ninja")):
        native = getattr(sys.modules.get(module), name, None)
        if native is not None and not is_wrapped(native):
            shared = _flashinfer if name == "run_ninja" else _tvm_ffi
            setattr(sys.modules[module], name, shared(native))


@fails_open(lambda cpp_extension: None)
def _hook_extensions(cpp_extension: Any) -> None:
    native = cpp_extension._jit_compile
    if is_wrapped(native):
        return
    if name := differing("torch", _NEEDED):
        notices.tell(f"this torch's {name.partition(':')[2]} differs: extensions are built by each rank")
        return
    signature = inspect.signature(native)

    @wraps(native)
    def jit_compile(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
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
            return request.load(place)
        return backend.obtain(request, functools.partial(_from, request, compile))

    cpp_extension._jit_compile = jit_compile
    cpp_extension._maybe_write = _maybe_write


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
    def build_ninja(build_dir: str) -> None:
        place = Path(build_dir)
        _build("tvm_ffi", place, place / directories.NAME, lambda directory, _: native(str(directory)))

    return build_ninja


def _build(package: str, workdir: Path, file: Path, ninja: directories.Ninja) -> None:
    request = directories.request_of(package, workdir.resolve(), file.resolve(), ninja)
    if request is None:
        ninja(workdir, file)
    else:
        backend.obtain(request, lambda: ninja(workdir, file))
