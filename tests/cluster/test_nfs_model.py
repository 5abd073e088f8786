"""The modelled NFS server of the benchmarks: which calls are requests, and one budget for all clients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cluster.earlier_job import fill
from benchmarks.nfs_model import LEAST, NfsServer
from tests.support import interpose

pytestmark = pytest.mark.skipif(interpose.find_compiler() is None, reason="no C compiler")

_CLIENT = """
import asyncio
from benchmarks.nfs_model import Client

async def main():
    client = Client()
    await asyncio.gather(*(client.make(count) for count in (1, 5, 20)))

asyncio.run(main())
"""


@pytest.fixture
def server(tmp_path: Path) -> NfsServer:
    (tmp_path / "store").mkdir()
    return NfsServer(tmp_path / "server", tmp_path / "store")


def requests_of(server: NfsServer, code: str, *arguments: object) -> int:
    before = server.requests
    command = [sys.executable, "-c", f"import os, sys\nfrom pathlib import Path\n{code}", *map(str, arguments)]
    subprocess.run(command, env=os.environ | server.environ, check=True)
    return server.requests - before


@pytest.mark.parametrize(
    ("code", "requests"),
    [
        ("os.close(os.open(store / 'file', os.O_RDONLY))", 2),  # OPEN, CLOSE
        ("(store / 'file').read_bytes()", 4),  # and a READ for each of 1.5 MiB; none at the end
        ("(store / 'small').read_bytes()", 3),
        ("(store / 'new').write_bytes(b'-')", 3),  # OPEN, WRITE, CLOSE
        ("(store / 'missing').exists()", 1),
        ("os.close(os.open(store, os.O_RDONLY | os.O_DIRECTORY))", 1),
        ("os.listdir(store)", 2),
        ("(store / 'a').mkdir(); os.rename(store / 'a', store / 'b'); (store / 'b').rmdir()", 3),
        ("(store.parent / 'beside').write_bytes(b'-'); (store.parent / 'beside').read_bytes()", 0),
    ],
)
def test_a_call_on_a_file_of_the_store_is_so_many_requests(
    server: NfsServer, tmp_path: Path, code: str, requests: int
) -> None:
    (tmp_path / "store" / "file").write_bytes(bytes(3 << 19))
    (tmp_path / "store" / "small").write_bytes(b"-")
    assert requests_of(server, f"store = Path(sys.argv[1])\n{code}", tmp_path / "store") == requests


def test_a_fetch_is_a_few_requests_and_not_less_than_one_file(server: NfsServer, tmp_path: Path) -> None:
    ((digest, manifest),) = fill(tmp_path / "store", [("kernel", 1.0)], pack=False).items()
    assert LEAST < server.of_fetch(tmp_path / "store", digest, manifest) <= 8


def test_requests_without_files_are_counted_too(server: NfsServer) -> None:
    assert requests_of(server, _CLIENT) == 26
