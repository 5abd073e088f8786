"""Called by torch at the end of its import, in every process of an environment in which kcoord is installed.

So ranks below ``kcoord exec`` hook torch.compile, and their script does not change. It is registered under ``torch.backends``,
torch's entry points for extensions; ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns these off.
"""

from __future__ import annotations

import atexit
import os
import sys

from kcoord.ranks import HOOK


def autoload() -> None:
    """Hook this process's compilers if a launcher of kcoord prepared its environment. Raises nothing: torch would not load."""
    if not (os.environ.get(HOOK) or os.environ.get("TRITON_CACHE_MANAGER", "").startswith("kcoord.")):
        if "KCOORD_STORE" in os.environ and not {"KCOORD_SOCKET", "KCOORD_DISABLE"} & set(os.environ):
            atexit.register(_tell_of_store)
        return
    try:
        from kcoord.backends.registry import install_openly
    except ImportError:  # a dependency is gone: the launcher has said so
        return
    install_openly()


def _tell_of_store() -> None:
    """One line on a node's first rank, if compilers were used without kcoord, though the user has named a store."""
    used = {"triton", "torch._inductor.codecache"} & set(sys.modules) and "compile_worker" not in sys.argv[0]
    if used and "kcoord.settings" not in sys.modules and os.environ.get("LOCAL_RANK", "0") == "0":
        print(
            "kcoord: KCOORD_STORE is set, but this job was started without kcoord: use kcoord-torchrun, kcoord exec, or "
            "kcoord.install() in the script",
            file=sys.stderr,
        )
