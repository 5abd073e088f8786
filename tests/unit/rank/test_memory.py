"""The memory tier: bounded, least recently used, and safe under sixteen threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from kcoord.keys.device import DeviceKey, GPUTarget
from kcoord.rank.memory import MemoryTier

H100 = DeviceKey(GPUTarget("cuda", 90, 32), 0)
OTHER_H100 = DeviceKey(GPUTarget("cuda", 90, 32), 1)
MI300 = DeviceKey(GPUTarget("hip", "gfx942", 64), 0)


def test_a_handle_belongs_to_one_digest_and_one_device() -> None:
    memory: MemoryTier[str] = MemoryTier(10)
    memory.put("d", H100, "on 0")
    assert memory.get("d", DeviceKey(GPUTarget("cuda", 90, 32), 0)) == "on 0"
    assert memory.get("d", OTHER_H100) is None
    assert memory.get("d", MI300) is None
    assert memory.get("e", H100) is None


def test_the_first_of_two_handles_is_kept() -> None:
    memory: MemoryTier[str] = MemoryTier(10)
    assert memory.put("d", H100, "first") == "first"
    assert memory.put("d", H100, "second") == "first"
    assert memory.get("d", H100) == "first"


@pytest.mark.parametrize("capacity", [1, 2, 7])
def test_it_holds_no_more_than_its_capacity(capacity: int) -> None:
    memory: MemoryTier[int] = MemoryTier(capacity)
    for n in range(3 * capacity):
        assert memory.put(f"d{n}", H100, n) == n
        assert len(memory) <= capacity
        assert memory.get(f"d{n}", H100) == n


def test_the_least_recently_used_handle_goes_first() -> None:
    memory: MemoryTier[int] = MemoryTier(3)
    for n in range(3):
        memory.put(f"d{n}", H100, n)
    memory.get("d0", H100)
    memory.put("d3", H100, 3)
    assert [memory.get(f"d{n}", H100) for n in range(4)] == [0, None, 2, 3]


@pytest.fixture
def hasty_switching() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty_switching")
def test_sixteen_threads_see_one_handle_per_key_and_never_more_than_the_capacity() -> None:
    memory: MemoryTier[tuple[str, int]] = MemoryTier(50)
    start, errors = threading.Barrier(16), []

    def work(me: int) -> None:
        start.wait()
        try:
            for n in range(1500):
                digest = f"d{(n * (me + 1)) % 80}"
                found = memory.get(digest, H100) or memory.put(digest, H100, (digest, me))
                assert found[0] == digest
                assert len(memory) <= 51  # one more while it is being inserted
        except BaseException as error:  # noqa: BLE001 - told by the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert len(memory) == 50
