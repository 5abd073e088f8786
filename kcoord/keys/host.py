"""Facts about this host that code built for it depends on: its ABI, and its processor's instructions."""

from __future__ import annotations

import functools
import platform
import sysconfig
from pathlib import Path


@functools.lru_cache(maxsize=1)
def host_abi() -> dict[str, str]:
    """Of C and C++ modules that Python loads. The C library counts by its name: an artifact tells the releases that it needs
    (`kcoord.artifacts.needs`).
    """
    return {
        "machine": platform.machine(),
        "libc": platform.libc_ver()[0],
        "python": str(sysconfig.get_config_var("EXT_SUFFIX")),
    }


@functools.lru_cache(maxsize=1)
def cpu_features() -> tuple[str, ...]:
    """The instructions that this processor has, for what is built with ``-march=native``. Raises OSError without /proc."""
    with Path("/proc/cpuinfo").open() as lines:
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return tuple(sorted(flags.partition(":")[2].split()))
