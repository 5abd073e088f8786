"""A rank that compiles kernels, and whose last one fails at its end: failing_rank.py REPORTS EXIT-CODE."""

from __future__ import annotations

import os
import sys

import worker

if __name__ == "__main__":
    reports, code = sys.argv[1:]
    worker.work(reports)
    worker.leave(reports)
    sys.exit(int(code) if int(os.environ["RANK"]) == worker.WORKERS - 1 else 0)
