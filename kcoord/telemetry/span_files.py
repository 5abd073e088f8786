"""Where spans lie: one file for each agent and job, which only its agent appends to.

``<local_dir>/traces/<job>/<agent>.spans`` is the node's own; ``<store>/v1/traces/<job>/`` has copies of all nodes'. A file is a
line that names its format, a msgpack map about its node, and then a map for each report of a process, or each line of the agent
itself (`Said`), which a reader that does not know them takes for an empty report. What a killed writer left
torn at the end is not read, nor is anything that is not what it should be: files are as little trusted as frames.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgpack

from kcoord.files.replace import replace_file
from kcoord.telemetry.job_names import directory_name
from kcoord.telemetry.spans import Process, Span, checked, plain_text

LARGEST_FILE = 8 << 20  # bytes; some 100,000 spans
SUFFIX = ".spans"
_FORMAT = b"kcoord-spans-1\n"
_KEPT = 7 * 86400.0  # seconds
_LONGEST_LINE = 500  # characters
MOST = 1 << 40  # of anything that is counted


def roots(store: Path | None, local_dir: Path) -> list[Path]:
    """The directories of jobs' time lines: this node's, and the store's copies."""
    return [local_dir / "traces", *([store / "v1" / "traces"] if store else [])]


def head(node: str) -> bytes:
    """What a file of `node` begins with."""
    return _FORMAT + _packed({"node": node})


def process_of(pid: int, rank: int | None) -> Process:
    """Who a client says it is, whose numbers may be anything; its node is the file's."""
    return Process("", pid if 0 <= pid <= MOST else 0, rank if rank is not None and 0 <= rank <= MOST else None)


def report(process: Process, spans: Iterable[Span], dropped: int = 0) -> bytes:
    """One process's report, to append."""
    document = {"pid": process.pid, "rank": process.rank, "spans": [s.to_wire() for s in spans], "dropped": dropped}
    return _packed(document)


def write_own(local_dir: Path, job: str, name: str, process: Process, wire: list[list[Any]], dropped: int) -> None:
    """The spans of a process that has no agent, in a file of their own, `name`. Raises OSError."""
    spans, refused = checked(wire, len(wire))
    directory = roots(None, local_dir)[0] / directory_name(job)
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(directory / f"{name}{SUFFIX}", head(process.node) + report(process, spans, dropped + refused))


def forget_old(local_dir: Path) -> None:
    """Remove this node's files that have not changed for a week. What cannot be removed stays."""
    for path in roots(None, local_dir)[0].glob("*/*"):
        with suppress(OSError):  # another agent may be forgetting the same files, or it is no file
            if time.time() - path.lstat().st_mtime > _KEPT:
                path.unlink()
                path.parent.rmdir()  # unless it holds another's


Moment = Literal["told", "begins", "ends"]


@dataclass(frozen=True)
class Said:
    """A line of an agent about itself: what it told its log, at most a second ago, or that it begins or ends. `when` is in Unix
    seconds by its node's clock."""

    when: float
    node: str
    text: str
    what: Moment = "told"

    def record(self) -> bytes:
        """To append to its node's file."""
        said = [self.when, self.what, self.text[:_LONGEST_LINE]]
        return _packed({"pid": 0, "rank": None, "spans": [], "dropped": 0, "said": said})


@dataclass
class SpanFile:
    """What one file says. `dropped` spans are missing from it; `problem` says why the rest of it could not be read."""

    node: str = ""
    reports: list[tuple[Process, list[Span]]] = field(default_factory=list)
    dropped: int = 0
    problem: str = ""
    said: list[Said] = field(default_factory=list)


def read(path: Path) -> SpanFile:
    """Never raises for what the file holds. Raises OSError."""
    with path.open("rb") as file:
        content = file.read(LARGEST_FILE + 1)
    found = SpanFile()
    if len(content) > LARGEST_FILE:
        found.problem = f"it is larger than {LARGEST_FILE >> 20} MiB"
    elif not content.startswith(_FORMAT):
        found.problem = "it is another version's, or no time line" if content else ""
    if not content or found.problem:
        return found
    try:
        documents = _documents(content[len(_FORMAT) :])
        found.node = plain_text(_of(next(documents, {"node": "?"}), "node", str))
        for document in documents:
            _add_report(found, document)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        found.problem = f"a part of it cannot be read: {error}"
    return found


def _add_report(found: SpanFile, document: Any) -> None:
    pid, rank, dropped = _of(document, "pid", int), document.get("rank"), _of(document, "dropped", int)
    if rank is not None:
        rank = _of(document, "rank", int)
    wire = _of(document, "spans", list)
    spans, refused = checked(wire, len(wire))  # a file's own bound holds them
    found.dropped += dropped + refused
    if document.get("said") is not None:
        found.said.append(_said(found.node, document["said"]))
    if spans:
        found.reports.append((Process(found.node, pid, rank), spans))


def _said(node: str, wire: Any) -> Said:
    """Raises ValueError."""
    if not isinstance(wire, list) or len(wire) < 3:
        raise ValueError("'said' must be a list of three values")
    when, what, text = wire[:3]
    if isinstance(when, bool) or not isinstance(when, (int, float)) or not 0 <= when <= MOST:
        raise ValueError("'said' must begin with a time")
    known: Moment = what if what in ("begins", "ends") else "told"
    return Said(float(when), node, plain_text(text, _LONGEST_LINE), known)


def _documents(body: bytes) -> Iterator[Any]:
    unpacker = msgpack.Unpacker(max_buffer_size=LARGEST_FILE, unicode_errors="surrogatepass")
    unpacker.feed(body)
    yield from unpacker  # ends before what is torn


def _of(document: Any, name: str, kind: type[Any]) -> Any:
    value = document.get(name) if isinstance(document, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and not 0 <= value <= MOST):
        raise ValueError(f"{name!r} must be {kind.__name__}")
    return value


def _packed(document: dict[str, Any]) -> bytes:
    return bytes(msgpack.packb(document, unicode_errors="surrogatepass"))
