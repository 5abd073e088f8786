"""The C modules that Triton builds with the host's compiler (drivers, launchers of kernels), each one file of its cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kcoord.artifacts.local import Artifact
from kcoord.backends.base import Backend
from kcoord.backends.triton.backend import MODULES, base32
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import DeviceKey
from kcoord.keys.host import host_abi


@dataclass(frozen=True)
class Module:
    """`digest` is Triton's key, of the source; `cache` Triton's cache directory."""

    filename: str
    digest: str
    cache: Path


class TritonModules(Backend[Module, str]):
    """A handle is the path of the library."""

    name = MODULES
    keeps_handles = False
    aside = True  # a summary that counted modules would contradict Triton's listener

    def label(self, request: Module) -> str:
        return request.filename

    def key(self, request: Module) -> CacheKey:
        compilers = {name: os.environ.get(name) for name in ("CC", "CXX")}
        return CacheKey.of(self.name, request.filename, triton_key=request.digest, compilers=compilers, **host_abi())

    def device(self, request: Module) -> DeviceKey | None:
        return None

    def home(self, request: Module, key: CacheKey) -> Path:
        return request.cache / base32(key.digest)

    def required(self, request: Module) -> tuple[str, ...]:
        return (request.filename,)

    def load(self, request: Module, artifact: Artifact) -> str:
        return str(artifact.path / request.filename)
