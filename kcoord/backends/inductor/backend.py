"""Inductor as a `Backend`: entries of torch's own caches, whose compile torch runs itself between `begin` and `finish`.

A *unit* is what Dynamo hands to AOTAutograd: a graph with its forward, its backward and their metadata. A *graph* is one FX graph
that Inductor compiles. Both have torch's own key, and an artifact of either is the entries that torch would keep in its caches.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgpack

from kcoord.artifacts.local import Artifact
from kcoord.backends.base import Backend
from kcoord.keys.device import Scope
from kcoord.keys.host import cpu_features
from kcoord.rank.coordinator import ABSENT
from kcoord.settings import Settings

UNIT, GRAPH = "aot_autograd", "inductor"
"""The kinds of entries, by torch's names of their caches."""
FILE = "entries.msgpack"
CACHE = "TORCHINDUCTOR_CACHE_DIR"
_FORMAT = 2  # from then on a unit's backward donates

Entries = dict[tuple[str, str], list[bytes]]
"""Contents by kind and torch's key: variants of one key differ in their guards."""


@dataclass(frozen=True)
class Entry:
    """A request for an entry. `hints`: the values that the graph's symbolic sizes have now. `donated`: the saved tensors whose
    memory a backward may take, which torch's key leaves open. `problem`: why it is not shared.
    """

    kind: str
    key: str
    hints: tuple[int, ...] = ()
    donated: tuple[int, ...] = ()
    problem: str = ""


class InductorBackend(Backend[Entry, Entries]):
    """A handle is the entries of an artifact; torch makes of them what it makes of its own, and keeps that in memory."""

    name = "inductor"
    modules = ("torch._inductor.compile_fx",)
    packages = MappingProxyType({"torch": (2, 8)})
    scope = Scope.MODEL  # torch's key holds the model's name, and autotuning chooses for it
    keeps_handles = False

    def hook(self) -> None:
        from kcoord.backends.inductor import hooks

        hooks.hook()

    def child_environ(self, settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
        """Torch's own caches are this user's alone, too: what a lead finds there, it shares."""
        return {CACHE: environ.get(CACHE) or str(settings.local_dir / self.name)}

    def tiers(self, environ: Mapping[str, str]) -> dict[str, Path]:
        chosen = environ.get(CACHE)
        return {CACHE: Path(chosen)} if chosen else {}

    def bypass(self, request: Entry) -> str:
        return request.problem

    def label(self, request: Entry) -> str:
        return ("unit" if request.kind == UNIT else "graph") + f"-{request.key[:13]}"

    def factors(self, request: Entry) -> Mapping[str, Any]:
        """Torch's key holds the graph, the inputs, torch's sources and settings, and the GPU; not all versions hold the CPU."""
        from kcoord.backends.inductor.ambient import ambient

        return {
            "format": _FORMAT,
            "entry": request.kind,
            "torch_key": request.key,
            "hints": request.hints,
            "donated": request.donated,
            "ambient": ambient(),
            "cpu": cpu_features(),
            "python": sys.version_info[:2],  # entries are pickles
        }

    def required(self, request: Entry) -> Collection[str]:
        return (FILE,)

    def load(self, request: Entry, artifact: Artifact) -> Entries:
        return read_entries(artifact.path / FILE)

    def entries(self, request: Entry, artifact: Artifact) -> Entries:
        """As `load`; nothing, and a notice, if the artifact cannot be read: then this rank compiles for itself."""
        found = self._loaded(request, artifact)
        return {} if found is ABSENT else found


def write_entries(path: Path, entries: Iterable[tuple[str, str, bytes]]) -> None:
    path.write_bytes(msgpack.packb([list(entry) for entry in entries]))


def read_entries(path: Path) -> Entries:
    found: Entries = {}
    for kind, key, content in msgpack.unpackb(path.read_bytes()):
        found.setdefault((kind, key), []).append(content)
    return found
