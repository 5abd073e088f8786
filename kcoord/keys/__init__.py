"""Keys: the identity of an artifact, as named factors and their digest."""

from kcoord.keys.cache_key import CacheKey, Factor, FactorDiff
from kcoord.keys.device import DeviceKey, GPUTarget, Scope, current_device

__all__ = ["CacheKey", "DeviceKey", "Factor", "FactorDiff", "GPUTarget", "Scope", "current_device"]
