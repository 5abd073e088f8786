"""Tests on a real NFS server run where ``NFS_RIG`` names a rig, on NFS v3 and on v4.1."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.nfs.figures import Figures
from tests.nfs.rig import Job, Rig

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def rig() -> Rig:
    command, share = os.environ.get("NFS_RIG"), os.environ.get("RIG_SHARE")
    if not command or not share:
        pytest.skip("NFS_RIG and RIG_SHARE name no rig with a real NFS server: see tests/nfs/README.md")
    rig = Rig(command, Path(share))
    rig.install()
    return rig


@pytest.fixture(scope="session")
def redis(rig: Rig) -> Iterator[str]:
    with rig.redis() as url:
        yield url


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest, rig: Rig) -> Iterator[Figures]:
    found = Figures()
    kernel, cores = rig.run("uname -r; nproc").split()
    processor = rig.run("grep -m1 'model name' /proc/cpuinfo").partition(":")[2].strip()
    found.rig = (
        f"a kernel NFS server and three client hosts (namespaces, default mount options) in one guest: Linux {kernel}, "
        f"{cores} virtual cores ({processor})"
    )
    yield found
    found.save(whole=not request.session.testsfailed)


@pytest.fixture(params=["v3", "v4"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def job(rig: Rig, redis: str, version: str) -> Callable[..., Job]:
    """``job(**settings)``: a job with Redis, on this version of NFS."""
    return lambda **settings: Job(rig, version, redis, **settings)


@pytest.fixture
def job_without_redis(rig: Rig, version: str) -> Callable[..., Job]:
    return lambda **settings: Job(rig, version, None, **settings)
