"""The programs that Triton runs and the libraries that it links, as its environment, its knobs and its package choose them."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import triton

from kcoord.keys.environment import Environment, variables
from kcoord.keys.tools.toolchain import tools

PACKAGE = Path(triton.__file__).parent
_KNOBS = {
    "TRITON_PTXAS_PATH": ("nvidia", "ptxas"),
    "TRITON_PTXAS_BLACKWELL_PATH": ("nvidia", "ptxas_blackwell"),
    "TRITON_LIBDEVICE_PATH": ("nvidia", "libdevice_path"),
    "TRITON_HIP_LLD_PATH": ("amd", "lld_path"),
    "TRITON_AMD_CODEGEN_PATH": ("amd", "codegen_path"),
}
_PLUGINS = ("LLVM_PASS_PLUGIN_PATH", "TRITON_PLUGIN_PATHS")
TOOL_VARIABLES = frozenset((*_KNOBS, *_PLUGINS))
"""The variables that choose tools."""
_PLACES = Environment(TOOL_VARIABLES)
_SHIPPED = {
    "nvidia": ("bin/ptxas", "bin/ptxas-blackwell", "lib/libdevice.10.bc", "lib/gsan.ll"),
    "amd": ("lib/ocml.bc", "lib/ockl.bc", "lib/asanrtl.bc", "lib/libtriton_amd_codegen.so", "llvm/bin/ld.lld"),
}
_ROCM_LINKERS = ("/opt/rocm/llvm/bin/ld.lld", "/usr/bin/ld.lld")
_SECTIONS = {"cuda": ("nvidia",), "hip": ("amd",)}


def triton_tools(backend: str | None = None, package: Path = PACKAGE) -> dict[str, str]:
    """Paths of what the Triton in `package` may run or link for ``cuda`` or ``hip`` (None: both), by label; some may be missing.

    Read live: the choices of the environment and of `triton.knobs`, *and* the package's own files, which Triton falls back on
    if a chosen tool does not work. No process is run to find out.
    """
    knobs = tuple(vars(getattr(triton.knobs, section)).get(knob) for section, knob in _KNOBS.values())
    return dict(_paths(package, _SECTIONS.get(backend or "", ("nvidia", "amd")), _PLACES.token(), knobs))


@functools.lru_cache(maxsize=16)
def _paths(package: Path, sections: tuple[str, ...], token: bytes, knobs: tuple[str | None, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for section in sections:
        home = package / "backends" / section
        found |= {part.rpartition("/")[2]: f"{home}/{part}" for part in _SHIPPED[section]}
    set_ = variables(token)
    for (variable, (section, _)), knob in zip(_KNOBS.items(), knobs, strict=True):
        chosen = knob or set_.get(variable)
        if section in sections and chosen:
            found[variable] = chosen
    if "amd" in sections and hasattr(triton.knobs.amd, "lld_path"):  # 3.4 runs a linker
        found |= {path: path for path in _ROCM_LINKERS}
    for variable in _PLUGINS:
        paths = set_.get(variable, "").split(os.pathsep)
        found |= {f"{variable}.{number}": path for number, path in enumerate(paths) if path}
    return found


def tool_factors(local_dir: Path, backend: str | None = None, package: Path = PACKAGE) -> dict[str, Any]:
    """The content of the tools of `triton_tools` that exist, and of those that they run, as it is now, by label."""
    return {label: tool.sha256 for label, tool in tools(triton_tools(backend, package), local_dir).items()}
