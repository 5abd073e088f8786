"""The environment variables of a test's processes: none of them is a setting from outside."""

from __future__ import annotations

import os

_PREFIXES = ("KCOORD_", "TRITON_", "TORCHINDUCTOR_", "PET_", "SLURM_", "STALE_")
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_JOB_ID")


def is_foreign(name: str) -> bool:
    """True if a variable of this name, set outside, would be a setting of what is tested."""
    return name.startswith(_PREFIXES) or name in _RANK_VARIABLES


def clean_environ() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not is_foreign(name)}
    # each test has a store of its own, and records a profile if it says so
    return {**kept, "KCOORD_STORE_CREATE": "1", "KCOORD_PROFILE": "off"}
