"""Inductor as a `Backend`: entries of torch's own caches, whose compile torch runs itself between `begin` and `finish`."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.backends.backend import Backend
from kcoord.backends.fail_open import fails_open
from kcoord.backends.inductor.ambient import ambient
from kcoord.backends.inductor.request import FILE, UNIT, Entries, Entry, read_entries
from kcoord.keys.device import Scope
from kcoord.keys.host import cpu_features
from kcoord.rank.coordinator import ABSENT, Request

_FORMAT = 2  # from then on a unit's backward donates
_ROOT = re.compile(r"^L\['\w+'\]\.?|_modules\['|'\]")  # Dynamo's name of what is compiled, and of members
_LINE = re.compile(r'File "(.+)", line (\d+), in (\S+)')


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

    def adjust(self, request: Entry, wanted: Request) -> Request:
        """With the modules of the model, which people know, outside the key: equal layers share one."""
        return wanted._replace(explain=lambda: {"modules": text} if (text := modules_of(request.graph)) else {})

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


@fails_open(lambda graph: "")
def modules_of(graph: Any) -> str:
    """The first and the last module, or line, whose code is in torch's `graph`: ``blocks.0.qkv to blocks.2.down, backward``."""
    nodes = list(graph.graph.nodes)
    names = [name for node in nodes if node.op.startswith("call") for name in _source_of(node)]
    text = " to ".join(dict.fromkeys(names[:1] + names[-1:]))
    is_backward = any(node.op == "placeholder" and node.name.startswith("tangents") for node in nodes)
    return f"{text}, backward" if is_backward else text


def _source_of(node: Any) -> Iterator[str]:
    modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if modules:
        path, kind = list(modules.values())[-1]
        yield _ROOT.sub("", path) or getattr(kind, "__name__", str(kind))
    elif lines := _LINE.findall(node.meta.get("stack_trace") or ""):
        file, line, function = lines[-1]
        yield f"{function} ({PurePath(file).name}:{line})"


backend = InductorBackend()
