"""The pool of a launched job: it compiles the profile while the ranks start, on all cores of all nodes."""

from __future__ import annotations

import ast
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

from kcoord.rank.client import AgentClient
from kcoord.rank.pool_start import PoolStart, Ranks, has_cores_to_spare
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from kcoord_launch.console import say
from kcoord_launch.environment import with_variables

_LARGEST = 1 << 20  # bytes of a script that are looked at


@contextmanager
def pool_beside(args: Any, environment: Mapping[str, str]) -> Iterator[None]:
    """Start the pool for the ranks of torchrun's `args`, which will have the variables `environment`; end it after the block."""
    environ, notices = with_variables(environment), Notices()
    settings = Settings.from_environ(environ)
    if settings.disable or settings.recorded_as is None or not has_cores_to_spare(ranks_of_node(args)):
        yield
        return
    try:
        script = "" if args.module else str(Path(args.training_script).resolve())
        ranks = Ranks(_path(args), script, environ, packages_of(script))
    except OSError as error:  # the working directory is gone
        say(f"nothing is compiled ahead: {error}")
        yield
        return
    with (
        closing(AgentClient(settings, notices)) as client,
        closing(PoolStart(settings, notices, client, ranks)) as pool,
    ):
        pool.start_soon(node=_node(args), nodes=most_nodes(args))
        yield


def _path(args: Any) -> list[str]:
    """`sys.path` of the ranks, instead of this command's."""
    if sys.flags.safe_path:
        return sys.path
    first = Path.cwd() if args.module else Path(args.training_script).resolve().parent
    return [str(first), *sys.path[1:]]


def packages_of(script: str) -> set[str]:
    """The packages that the script's text imports."""
    try:
        with Path(script).open("rb") as file:
            tree = ast.parse(file.read(_LARGEST))
    except (OSError, ValueError, SyntaxError, RecursionError):  # it is for Python to say so
        return set()
    found = (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
    names = [name for node in found for name in _names(node)]
    return {name.partition(".")[0] for name in names}


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if node.module and not node.level else []


def ranks_of_node(args: Any) -> int:
    """Ranks of this node; 1 for ``auto`` and ``gpu``, which torchrun resolves later."""
    return int(args.nproc_per_node) if str(args.nproc_per_node).isdecimal() else 1


def _node(args: Any) -> int:
    """This node's number; a hash of its host name where the rendezvous will number the nodes."""
    return int(args.node_rank) if args.rdzv_backend == "static" else crc32(platform.node().encode())


def most_nodes(args: Any) -> int:
    most = str(args.nnodes).rpartition(":")[2]
    return int(most) if most.isdecimal() else 1
