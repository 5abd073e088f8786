"""``emit.py DIRECTORY COUNT``: write a graph's kernels to Triton's directory once COUNT processes of this kind are there."""

from __future__ import annotations

import sys
import time
import uuid
from pathlib import Path

import kcoord

kcoord.install()

from torch._inductor import compile_fx  # noqa: E402, F401 - hooked when it is imported
from torch._inductor.triton_bundler import (  # noqa: E402
    TritonBundle,
    TritonBundler,
    TritonKernelArtifact,
    TritonKernelArtifacts,
)

place, count = Path(sys.argv[1]), int(sys.argv[2])
files = [TritonKernelArtifact(f"{number}.cubin", bytes(1 << 20)) for number in range(4)]
bundle = TritonBundle([TritonKernelArtifacts(f"KERNEL{number}", 0, files) for number in range(20)], [])
(place / str(uuid.uuid4())).touch()
deadline = time.monotonic() + 300
while len(list(place.iterdir())) < count:
    assert time.monotonic() < deadline, "the others did not come"
    time.sleep(0.001)
TritonBundler.read_and_emit(bundle)
