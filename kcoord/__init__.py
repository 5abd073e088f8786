"""kcoord makes every kernel of a distributed training job compile exactly once.

The public names are imported when they are first used: ``import kcoord`` itself imports neither torch, triton nor redis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kcoord.artifacts.local import Artifact as Artifact
    from kcoord.backends.python.compile_once import compile_once as compile_once
    from kcoord.backends.registry import install as install
    from kcoord.errors import CompileFailed as CompileFailed
    from kcoord.errors import GlobalsDrift as GlobalsDrift
    from kcoord.errors import KcoordError as KcoordError
    from kcoord.errors import KeyFactorError as KeyFactorError
    from kcoord.errors import SettingsError as SettingsError
    from kcoord.keys.arguments.signature import register_signature as register_signature
    from kcoord.keys.cache_key import CacheKey as CacheKey
    from kcoord.keys.device import DeviceKey as DeviceKey
    from kcoord.keys.device import GPUTarget as GPUTarget
    from kcoord.keys.device import Scope as Scope
    from kcoord.rank.connect import connect as connect
    from kcoord.rank.coordinator import Coordinator as Coordinator
    from kcoord.replay.warmup import warmup as warmup

__version__ = "0.1.0"

_HOME = {
    "Artifact": "kcoord.artifacts.local",
    "CacheKey": "kcoord.keys.cache_key",
    "CompileFailed": "kcoord.errors",
    "Coordinator": "kcoord.rank.coordinator",
    "DeviceKey": "kcoord.keys.device",
    "GPUTarget": "kcoord.keys.device",
    "GlobalsDrift": "kcoord.errors",
    "KcoordError": "kcoord.errors",
    "KeyFactorError": "kcoord.errors",
    "Scope": "kcoord.keys.device",
    "SettingsError": "kcoord.errors",
    "compile_once": "kcoord.backends.python.compile_once",
    "connect": "kcoord.rank.connect",
    "install": "kcoord.backends.registry",
    "register_signature": "kcoord.keys.arguments.signature",
    "warmup": "kcoord.replay.warmup",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    # each is imported once: import_module takes locks, which a signal's handler does not get before Python 3.12
    if name not in _HOME:
        hint = ": call kcoord.connect().get_or_compile(…)" if name == "get_or_compile" else ""
        raise AttributeError(f"module 'kcoord' has no attribute {name!r}{hint}")
    found = globals()[name] = getattr(import_module(_HOME[name]), name)
    return found
