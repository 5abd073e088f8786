"""Several nodes without Redis: lease files in the store elect one compiler. And Redis lost in mid-job: they step in."""

from __future__ import annotations

import errno
import time
from collections import Counter
from pathlib import Path

from tests.support.interpose import Interposer
from tests.support.jobs import KERNELS, NODES, Job
from tests.support.sandbox import Sandbox


def litter(sandbox: Sandbox) -> list[Path]:
    return [p for p in (sandbox.root / "store" / "v2" / "leases").rglob("*") if p.is_file() and p.suffix != ".outcome"]


def test_two_nodes_with_a_store_and_no_redis_compile_each_kernel_once(sandbox: Sandbox) -> None:
    with Job(sandbox, "") as job:
        batch = job.finished(job.begin())
        assert batch.compiles == dict.fromkeys(range(KERNELS), 1)
        assert [job.coordinator_of(n) for n in range(NODES)] == ["lease files"] * NODES
        assert [job.told_since([0] * NODES, "cannot be used")] == [[[]] * NODES]
    assert not litter(sandbox)


def test_lease_files_that_cannot_be_written_leave_each_node_to_itself(sandbox: Sandbox, interposer: Interposer) -> None:
    with Job(sandbox, "", **interposer.environ) as job:
        job.compile_together()
        fault = interposer.fail("open", below=sandbox.root / "store" / "v2" / "leases", error=errno.EROFS)
        number = job.begin()
        job.finished(number)
        compiles = Counter((begun.kernel, begun.node) for begun in job.begun(number))
        assert {kernel for kernel, _ in compiles} == set(range(KERNELS))
        assert set(compiles.values()) == {1}, "the ranks of one node compiled the same kernel"
        assert [job.coordinator_of(n) for n in range(NODES)] == ["this node"] * NODES
        told = job.told_since([0] * NODES, "lease files cannot be used")
        assert [len(lines) for lines in told] == [1] * NODES
        assert all("mount it read-write" in lines[0] for lines in told)
        fault.end()
        deadline = time.monotonic() + 10.0
        while [job.coordinator_of(n) for n in range(NODES)] != ["lease files"] * NODES:
            assert time.monotonic() < deadline, "lease files are not used again"
            time.sleep(0.05)
        job.compile_together()
