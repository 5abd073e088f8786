"""MLIR modules, by the classes of CuTe DSL's own binding, whose releases differ; and the text of pass pipelines.

A pipeline is ``builtin.module(cute-to-nvvm{opt-level=3 cubin-chip=sm_90a …})``.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

from kcoord.keys.device import GPUTarget

_ELF = b"\x7fELF\x02\x01"
_HEADER = 64  # bytes
_MACHINE = slice(18, 20)
_CUDA = b"\xbe\x00"


def text(module: Any, lines: bool) -> str:
    """All that passes read: every attribute, and source lines if `lines`."""
    return str(module.operation.get_asm(print_generic_op_form=True, enable_debug_info=lines))


def symbol(module: Any) -> str:
    """The name of the host's function; ``module`` if there is none."""
    functions = (each for each in _operations(module) if each.name == "func.func")
    return next((str(each.attributes["sym_name"]).strip('"') for each in functions), "module")


def bytecode(module: Any) -> bytes:
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


def cubin_headers(content: bytes) -> Iterator[bytes]:
    """The ELF header of each cubin in a module's bytecode."""
    at = content.find(_ELF)
    while at >= 0:
        header = content[at : at + _HEADER]
        if header[_MACHINE] == _CUDA:
            yield header
        at = content.find(_ELF, at + 1)


def fill(module: Any, content: bytes) -> Any:
    """Make `module` the one of the bytecode `content`, as passes would have. Raises before it changes anything."""
    compiled = type(module).parse(content, context=module.context)
    for name in _names(module):
        del module.operation.attributes[name]
    for name in _names(compiled):
        module.operation.attributes[name] = compiled.operation.attributes[name]
    forget = getattr(module.context, "_clear_live_operations_inside", None)  # before 4.5, as a pass manager does
    if forget is not None:
        forget(module.operation)
    for each in reversed(_operations(module)):
        each.erase()
    for each in _operations(compiled):
        each.detach_from_parent()
        module.body.append(each)
    return module


def _operations(module: Any) -> list[Any]:
    return [each.operation for each in module.body.operations]


def _names(module: Any) -> list[str]:
    attributes = module.operation.attributes
    return [attributes[index].name for index in range(len(attributes))]


# Pipelines.

_CHIP = re.compile(r"\bcubin-chip='?sm_(\w+)")
_WITH_LINES = re.compile(r"\b(?:preserve-line-info|enable-assertions|enable-iket)(?:=true)?(?=[\s}])")
_WITH_FILES = re.compile(r"\b((?:dump|print)-[\w-]+|flatten-locs-output-json-path)(?!=false)(?==|[\s}])")
_LINKS = re.compile(r"\blink-libraries=")


def target(pipeline: str) -> GPUTarget | None:
    """The GPU that code is generated for; None if the pipeline names none."""
    chips = _CHIP.findall(pipeline)
    try:
        return GPUTarget.parse(f"cuda:{chips[-1]}") if chips else None
    except ValueError:
        return None


def keeps_lines(pipeline: str) -> bool:
    """True if the code may name files and lines of the source: line tables, and the messages of assertions before 4.6."""
    return _WITH_LINES.search(pipeline) is not None


def output(pipeline: str) -> str:
    """The first option by which a compile writes files, or prints; empty if there is none."""
    found = _WITH_FILES.search(pipeline)
    return found[1] if found else ""


def links(pipeline: str) -> bool:
    """True if libraries of device code are linked."""
    return _LINKS.search(pipeline) is not None
