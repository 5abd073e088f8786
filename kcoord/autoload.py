"""Called by torch at the end of its import, in every process of an environment in which kcoord is installed.

So ranks below ``kcoord exec`` hook torch.compile, and their script does not change. It is registered under ``torch.backends``,
torch's entry points for extensions; ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns these off.
"""

from __future__ import annotations

import os


def autoload() -> None:
    """Hook this process's compilers if a launcher of kcoord prepared its environment. Raises nothing: torch would not load."""
    if not os.environ.get("TRITON_CACHE_MANAGER", "").startswith("kcoord."):
        return
    try:
        from kcoord.backends.registry import install_openly
    except ImportError:  # a dependency is gone: the launcher has said so
        return
    install_openly()
