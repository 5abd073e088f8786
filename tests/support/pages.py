"""A job's report: its span files and artifacts on a disk, and its page as a reader sees it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import kcoord
from kcoord.rank.coordinator import Coordinator
from kcoord.settings import Settings
from kcoord.telemetry import span_files
from kcoord.telemetry.spans import Process, Span, directory_name
from tests.support.sandbox import Sandbox, eventually

HOSTILE = ["</script><script>document.title='owned'</script>", "<img src=x onerror=\"document.title='owned'\">",
           "<!--", "{{data}}", "\u2028'\"&amp;", "$&\\1"]  # fmt: skip
"""Texts that would do harm if a page took them for more than text."""


def save(root: Path, job: str, node: str, spans: dict[int, list[Span]], agent: str = "") -> Path:
    """A file as the agent of `node` writes it: each rank's spans."""
    directory = root / "traces" / directory_name(job)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{node}-{agent or 'agent'}.spans"
    deliveries = [span_files.delivery(Process(node, 100 + rank, rank), found) for rank, found in spans.items()]
    path.write_bytes(span_files.header(node) + b"".join(deliveries))
    return path


def make(sandbox: Sandbox, job: str, name: str = "scale", **factors: Any) -> None:
    """A job that compiles one kernel of this key."""
    settings = Settings.from_environ({"KCOORD_LOCAL_DIR": str(sandbox.local), "KCOORD_JOB": job})
    coordinator = Coordinator(settings)
    key = kcoord.CacheKey.of("test", name, **factors)
    coordinator.get_or_compile(key, lambda s: (s / "f").write_text("x"), scope=kcoord.Scope.TARGET)
    coordinator.close()
    eventually(lambda: any(p.stat().st_size for p in (sandbox.local / "traces" / job).glob("*.spans")))


class Text(HTMLParser):
    """The text that a reader sees, and the tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.seen: list[str] = []
        self.feed(html)
        self.text = re.sub(r"\s+", " ", " ".join(self.seen))

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] not in (["script"], ["style"]):
            self.seen.append(data)
