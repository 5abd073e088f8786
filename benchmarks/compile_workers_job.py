"""A rank whose pool of torch's compile workers does JOBS jobs, each SECONDS of CPU: ``compile_workers_job.py JOBS SECONDS``.

It prints a line once Inductor is imported, begins when it reads one, prints one line of JSON, and ends when its input does.
"""

from __future__ import annotations

import json
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
futures = [AsyncCompile.process_pool().submit(exec, code) for _ in range(jobs)]
for future in futures:
    future.result()
print(json.dumps({"wall": time.perf_counter() - begun}), flush=True)
sys.stdin.readline()
