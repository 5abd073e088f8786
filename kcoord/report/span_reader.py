"""Reads span files (`kcoord.telemetry.span_files`), which are as little trusted as frames.

A torn record at the end is skipped. A malformed record ends the reading, and `SpanFile.problem` says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from kcoord.files.reading import unpack
from kcoord.telemetry.span_files import FORMAT, LARGEST_FILE, LARGEST_NUMBER
from kcoord.telemetry.spans import Process, Span, checked, plain_text

_MOST_VALUES = 1 << 20  # of a record: some 100,000 spans fit into a file


@dataclass
class SpanFile:
    """The content of one file. `dropped` spans are missing from it; `problem`: why the rest of it could not be read."""

    node: str = ""
    deliveries: list[tuple[Process, list[Span]]] = field(default_factory=list)
    dropped: int = 0
    problem: str = ""

    def _add(self, document: Any) -> None:
        """Raises ValueError."""
        pid, rank, dropped = _of(document, "pid", int), document.get("rank"), _of(document, "dropped", int)
        if rank is not None:
            rank = _of(document, "rank", int)
        wire = _of(document, "spans", list)
        spans, refused = checked(wire, len(wire))  # the file's size bounds them
        self.dropped += dropped + refused
        if spans:
            self.deliveries.append((Process(self.node, pid, rank, document.get("pool") is True), spans))


def read(path: Path) -> SpanFile:
    """Raises OSError, and nothing for the file's content."""
    with path.open("rb") as file:
        content = file.read(LARGEST_FILE + 1)
    found = SpanFile()
    if len(content) > LARGEST_FILE:
        found.problem = f"it is larger than {LARGEST_FILE >> 20} MiB"
    elif not content.startswith(FORMAT):
        found.problem = "it is another version's, or no time line" if content else ""
    if not content or found.problem:
        return found
    try:
        documents = _documents(content[len(FORMAT) :])
        found.node = plain_text(_of(next(documents, {"node": "?"}), "node", str))
        for document in documents:
            found._add(document)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        found.problem = f"a part of it cannot be read: {error}"
    return found


def _documents(body: bytes) -> Iterator[Any]:
    reader, begin = msgpack.Unpacker(max_buffer_size=LARGEST_FILE), 0
    reader.feed(body)
    with suppress(msgpack.exceptions.OutOfData):  # at the end, or at a torn record
        while True:
            reader.skip()
            yield unpack(body[begin : reader.tell()], _MOST_VALUES, unicode_errors="surrogatepass")
            begin = reader.tell()


def _of(document: Any, name: str, kind: type[Any]) -> Any:
    value = document.get(name) if isinstance(document, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and not 0 <= value <= LARGEST_NUMBER):
        raise ValueError(f"{name!r} must be {kind.__name__}")
    return value
