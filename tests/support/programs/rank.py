"""A rank that compiles kernels and knows nothing of kcoord. Prints one JSON line.

rank.py [--kernels N] [--broken] [--early-import] [--slow SECONDS] [--compiling FILE] [--until FILE] [--gate FILE]
        [--removes DIRECTORY]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120

parser = argparse.ArgumentParser()
parser.add_argument("--kernels", type=int, default=4)
parser.add_argument("--broken", action="store_true")
parser.add_argument("--early-import", action="store_true", help="import compile before anybody can wrap it")
parser.add_argument("--slow", type=float, default=0.0, help="each compile takes so many seconds more")
parser.add_argument("--compiling", type=Path, help="make this file when a compile begins")
parser.add_argument("--until", type=Path, help="a compile goes on once this file is there")
parser.add_argument("--removes", type=Path, help="this directory is removed before each kernel's machine code is made")
parser.add_argument("--gate", type=Path, help="say that all is imported by GATE.<pid>, then wait for GATE")
args = parser.parse_args()

import triton  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.compiler import compile as early_compile  # noqa: E402
from triton.compiler.compiler import ASTSource  # noqa: E402

import kernels  # noqa: E402

compiled: list[str] = []
loaded: list[str] = []
spans: list[tuple[float, float]] = []
paths: list[str] = []


def listen(*, src, metadata, metadata_group, times, cache_hit):
    (loaded if cache_hit else compiled).append(metadata["hash"])
    paths.extend(str(p) for p in metadata_group.values())


triton.knobs.compilation.listener = listen
make_ir = ASTSource.make_ir


def slow_make_ir(self, *arguments, **keywords):
    begun = time.time()
    if args.compiling:
        args.compiling.touch()
    time.sleep(args.slow)
    while args.until and not args.until.exists():
        time.sleep(0.005)
    try:
        return make_ir(self, *arguments, **keywords)
    finally:
        spans.append((begun, time.time()))


ASTSource.make_ir = slow_make_ir
make_cubin = CUDABackend.make_cubin


def lonely_make_cubin(self, *arguments, **keywords):
    if args.removes:
        shutil.rmtree(args.removes)
    return make_cubin(self, *arguments, **keywords)


CUDABackend.make_cubin = lonely_make_cubin
compile = early_compile if args.early_import else None
cubins, error = [], None
if args.gate:
    args.gate.with_suffix(f".{os.getpid()}").touch()
    while not args.gate.exists():
        time.sleep(0.005)
for factor in range(args.kernels):
    kernel = kernels.build_scale(factor + 2, compile)
    cubins.append(hashlib.sha256(kernel.asm["cubin"]).hexdigest())
if args.broken:
    try:
        kernels.build_broken(compile)
    except triton.compiler.CompilationError as caught:
        error = f"{type(caught).__name__}: {caught}"
line = json.dumps(
    {
        "rank": os.environ.get("RANK"),
        "compiled": compiled,
        "loaded": loaded,
        "cubins": cubins,
        "paths": paths,
        "spans": spans,
        "error": error,
        "redis": "redis" in sys.modules,
        "kcoord": "kcoord" in sys.modules,
        "password": os.environ.get("KCOORD_REDIS_URL"),
    }
)
sys.stdout.write(line + "\n")  # in one piece: ranks share a pipe
