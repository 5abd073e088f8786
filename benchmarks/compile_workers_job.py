"""A rank whose pool of torch's compile workers does JOBS jobs, each SECONDS of CPU: ``compile_workers_job.py JOBS SECONDS``.

It prints a line once Inductor is imported, begins when it reads one, prints one line of JSON, and ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
import time

import kcoord

kcoord.install()

import torch._inductor.compile_fx  # noqa: E402, F401 - hooked as it is imported
from torch._inductor.async_compile import AsyncCompile  # noqa: E402

jobs, seconds = int(sys.argv[1]), float(sys.argv[2])
print("here", flush=True)
sys.stdin.readline()
begun = time.perf_counter()
AsyncCompile.wakeup()
begin = "t = time.process_time()"
code = f"import time\n{begin}\nwhile time.process_time() < t + {seconds}: pass"
codes = [f"# kernel {number} of rank {os.environ['RANK']}\n{code}" for number in range(jobs)]
futures = [AsyncCompile.process_pool().submit(exec, each) for each in codes]
for future in futures:
    future.result()
print(json.dumps({"wall": time.perf_counter() - begun}), flush=True)
sys.stdin.readline()
