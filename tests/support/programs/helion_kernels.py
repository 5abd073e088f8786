"""A Helion kernel whose search is a stand-in: no GPU is there. ``helion_kernels.py MODE...`` prints one line of JSON.

Its search chooses the number of warps at random, as each process's own seed does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

modes = set(sys.argv[1:])
if "launched" not in modes:
    import kcoord

    kcoord.install()

import helion  # noqa: E402
import helion.language as hl  # noqa: E402
import torch  # noqa: E402
from helion.autotuner import local_cache, search_algorithms  # noqa: E402
from helion.autotuner.random_search import RandomSearch  # noqa: E402

searches: list[str] = []
BY = 4.0 if "global" in modes else 3.0


def helper(value: Any) -> Any:
    return value


def other(value: Any) -> Any:
    return value * value


if "helper" in modes:
    helper = other


class Search(RandomSearch):  # type: ignore[misc]
    """Begins, with a file, and ends once all of ``TOGETHER`` have begun."""

    def autotune(self, *, skip_cache: bool = False) -> Any:
        searches.append(self.kernel.kernel.name)
        Path(f"began.{os.getpid()}").touch()
        while len(list(Path().glob("began.*"))) < int(os.environ.get("TOGETHER", "1")):
            time.sleep(0.01)
        return helion.Config(
            **{**dict(self.kernel.config_spec.default_config()), "num_warps": int(os.environ["WARPS"])}
        )


search_algorithms["Search"] = Search
os.environ["HELION_AUTOTUNER"] = "Search"
local_cache.extract_device = lambda args: SimpleNamespace(type="mtia")  # not a CPU's, which Helion tunes for nobody
local_cache.get_device_name = lambda device: "a GPU"


@helion.kernel(autotune_effort="full" if "full" in modes else "quick")
def scale(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(out.size()):
        out[tile] = helper(x[tile]) * BY
    return out


bound = scale.bind((torch.ones(64, 64),))
if "group" in modes:
    bound.env.process_group_name = "0"
config = bound.autotune((torch.ones(64, 64),), force="force" in modes)
print(json.dumps({"warps": config["num_warps"], "searches": len(searches)}))
