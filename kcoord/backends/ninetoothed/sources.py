"""The Triton source that NineToothed generates: one text for one kernel on every rank, in a file that is whole.

NineToothed names tensors and block sizes by counters of the process, and writes the functions that a kernel calls in the order of
a set. So a kernel's text, and Triton's key of it, differ from rank to rank. Here names are numbered anew for each kernel, and the
functions are sorted. The counters begin at a number that keeps all names equally wide: NineToothed sorts a kernel's parameters by
name, and that order must not depend on how many tensors a rank made before.

A rank that is killed while it writes a file leaves a part of it, which NineToothed would import for ever. Here a file is replaced
whole, and one that differs from its name is written again.
"""

from __future__ import annotations

import ast
import hashlib
import re
from pathlib import Path
from typing import Any

from kcoord.backends.fail_open import fails_open, notices
from kcoord.backends.wrapping import is_wrapped, wraps
from kcoord.files.atomic import replace_file
from kcoord.files.faults import store_error
from kcoord.interruption import let_through

_FIRST = 10**9
_AUTOMATIC = re.compile(r"ninetoothed_(tensor|BLOCK_SIZE)_(\d+)")


def hook(generation: Any, jit: Any, tensor: Any, symbol: Any) -> None:
    """Hook NineToothed's modules of these names. Idempotent."""
    store, load = generation.cache_source, jit.import_from_path
    if is_wrapped(store):
        return

    @wraps(store)
    def cache_source(source: str, *args: Any, **kwargs: Any) -> Path:
        path = None if args or kwargs else _stored(generation.CACHE_DIR, source)
        return path or store(source, *args, **kwargs)

    @wraps(load)
    def import_from_path(module_name: str, file_path: str, *args: Any, **kwargs: Any) -> Any:
        path = _canonical_file(Path(file_path))
        if path is None:
            return load(module_name, file_path, *args, **kwargs)
        # the name is in Triton's key, and the home is not in the name
        return load(f"ninetoothed:{path.stem}", str(path), *args, **kwargs)

    generation.cache_source, jit.import_from_path = cache_source, import_from_path
    tensor.Tensor.num_instances += _FIRST
    symbol.block_size._num_block_sizes += _FIRST


@fails_open(lambda path: None)
def _canonical_file(path: Path) -> Path | None:
    """The file of the canonical form of the source in the file `path`; None if it cannot be written."""
    return _stored(path.parent, canonical(path.read_text("utf-8")))


@fails_open(lambda directory, source: None)
def _stored(directory: Path, source: str) -> Path | None:
    """The file of `source`, named as NineToothed names it, whole; None if it cannot be written."""
    content = source.encode()
    path = directory / f"{hashlib.sha256(content).hexdigest()}.py"
    try:
        write_whole(path, content)
    except OSError as error:
        let_through(error)
        notices.tell(f"{store_error(error, directory)}; NineToothed writes its sources itself")
        return None
    return path


def canonical(source: str) -> str:
    """`source` with automatic names numbered from zero, and the functions that the kernel calls in the order of their texts."""
    found = sorted(set(_AUTOMATIC.findall(source)), key=lambda name: (len(name[1]), name))
    kinds = [kind for kind, _ in found]
    ranks = {name: kinds[:at].count(name[0]) for at, name in enumerate(found)}
    return _sorted(_AUTOMATIC.sub(lambda name: f"ninetoothed_{name[1]}_{ranks[name[1], name[2]]}", source))


def _sorted(source: str) -> str:
    """The kernel comes first, then its launch, which has no decorator, then the functions."""
    body = ast.parse(source).body
    launch = next(
        (at for at, node in enumerate(body) if isinstance(node, ast.FunctionDef) and not node.decorator_list), 0
    )
    functions = [node for node in body[launch + 1 :] if isinstance(node, ast.FunctionDef) and node.decorator_list]
    if len(functions) < 2 or functions != body[launch + 1 :]:
        return source
    starts = [node.decorator_list[0].lineno - 1 for node in functions]
    lines = source.split("\n")
    blocks = ["\n".join(lines[start:end]).rstrip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
    return "\n".join([*lines[: starts[0]], *sorted(blocks), ""])


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path` unless that is what it holds. Raises OSError."""
    if read(path) != content:
        replace_file(path, content)


def read(path: Path) -> bytes | None:
    """None for a file that is not there. Raises OSError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
