"""Inductor as a `Backend`: entries of torch's own caches, whose compile torch runs itself between `begin` and `finish`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.backends.backend import Backend
from kcoord.backends.inductor.ambient import ambient
from kcoord.backends.inductor.request import FILE, UNIT, Entries, Entry, read_entries
from kcoord.keys.device import Scope
from kcoord.keys.host import cpu_features
from kcoord.rank.coordinator import ABSENT

_FORMAT = 2  # from then on a unit's backward donates


class InductorBackend(Backend[Entry, Entries]):
    """A handle is the entries of an artifact; torch makes of them what it makes of its own, and keeps that in memory."""

    name = "inductor"
    scope = Scope.MODEL  # torch's key holds the model's name, and autotuning chooses for it
    keeps_handles = False

    def bypass(self, request: Entry) -> str:
        return request.problem

    def label(self, request: Entry) -> str:
        return ("unit" if request.kind == UNIT else "graph") + f"-{request.key[:13]}"

    def factors(self, request: Entry) -> Mapping[str, Any]:
        """Torch's key holds the graph, the inputs, torch's sources and settings, and the GPU; not all versions hold the CPU."""
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

    def trial(self) -> int:
        """A unit and a graph, which torch keeps in two caches. A product of matrices needs no C++ compiler."""
        import torch
        from torch._functorch import config as of_units
        from torch._inductor import config
        from torch._inductor.utils import fresh_cache

        for has_units in (True, False):
            torch._dynamo.reset()
            with fresh_cache(), of_units.patch(enable_autograd_cache=has_units), config.patch(compile_threads=1):
                torch.compile(torch.matmul)(torch.ones(2, 2), torch.ones(2, 2))
        return 2


backend = InductorBackend()
