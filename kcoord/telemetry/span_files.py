"""Span files: one for each agent and job, appended to by that agent alone. `kcoord.report.span_reader` reads them.

``<local_dir>/traces/<job>/<agent>.spans`` is this node's; ``<store>/v2/traces/<job>/`` holds copies of all nodes' files. A file
is a line that names its format, a msgpack map about its node, and a map for each delivery of a process. A writer
that is killed leaves a torn record at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack

from kcoord.files.atomic import LAYOUT, replace_file
from kcoord.files.private import make_own
from kcoord.telemetry.spans import Process, Span, checked, directory_name

LARGEST_FILE = 8 << 20  # bytes; some 100,000 spans
LARGEST_NUMBER = 1 << 40  # a pid, a rank, a count
FORMAT = b"kcoord-spans-1\n"
SUFFIX = ".spans"
_KEPT = 7 * 86400.0  # seconds


def roots(store: Path | None, local_dir: Path) -> list[Path]:
    """The directories that hold the jobs' time lines: this node's, then the store's."""
    return [local_dir / "traces", *([store / LAYOUT / "traces"] if store else [])]


def header(node: str) -> bytes:
    """The first bytes of a file of `node`."""
    return FORMAT + _packed({"node": node})


def process_of(pid: int, rank: int | None, *, pool: bool = False) -> Process:
    """A client by its own numbers, which may be anything; its node is the file's."""
    known = rank is not None and 0 <= rank <= LARGEST_NUMBER
    return Process("", pid if 0 <= pid <= LARGEST_NUMBER else 0, rank if known else None, pool)


def delivery(process: Process, spans: Iterable[Span], dropped: int = 0) -> bytes:
    """The record of one process's delivery."""
    wire = [span.to_wire() for span in spans]
    who = {"pid": process.pid, "rank": process.rank, **({"pool": True} if process.pool else {})}
    return _packed({**who, "spans": wire, "dropped": dropped})


def write_own(local_dir: Path, job: str, name: str, process: Process, wire: list[list[Any]], dropped: int) -> None:
    """Write the spans of a process without an agent into a file of its own, `name`. Raises OSError and `StoreError`."""
    spans, refused = checked(wire, len(wire))
    directory = roots(None, local_dir)[0] / directory_name(job)
    make_own(directory)
    replace_file(directory / f"{name}{SUFFIX}", header(process.node) + delivery(process, spans, dropped + refused))


def forget_old(local_dir: Path) -> None:
    """Remove this node's files that have not changed for a week. A file that cannot be removed stays."""
    for path in roots(None, local_dir)[0].glob("*/*"):
        with suppress(OSError):  # another agent may be removing the same files, or it is no file
            if time.time() - path.lstat().st_mtime > _KEPT:
                path.unlink()
                path.parent.rmdir()  # unless it holds another file


def _packed(document: dict[str, Any]) -> bytes:
    return bytes(msgpack.packb(document, unicode_errors="surrogatepass"))
