"""A cold start of torch.compile under DDP or FSDP2, stock and with kcoord: on GPUs, or on the CPU with small blocks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.result import Result, adopt_orphans, figures

_JOB = Path(__file__).with_name("torch_compile_job.py")
_STOCK, _OURS = ["-m", "torch.distributed.run"], ["-m", "kcoord_launch.torchrun"]
_CPU = {"ranks": 4, "layers": 1}
_RUNS = int(os.environ.get("RUNS", "1"))  # of each plan; the table has medians
_MODEL = os.environ.get("MODEL", "gpt")  # or loss, llama
_WRAP = os.environ.get("WRAP", "ddp")  # or fsdp, regional, none
_WRAPPED = {
    "ddp": "under DDP",
    "fsdp": "under FSDP2",
    "regional": "under FSDP2, layer by layer",
    "none": "without a wrapper",
}
_WIDTH = os.environ.get("WIDTH", "0")  # of the layers; 0: small ones
_GIVEN = os.environ.get("JOB", "").split()  # more arguments for the job, such as --dynamic
_BATCH = "6"  # another batch size than the job's
_VIRTUAL = os.environ.get("VIRTUAL") == "1"
_ALL = os.environ.get("PLANS", "all") == "all"  # else the best of stock's modes, and kcoord's
_KEEP = os.environ.get("KEEP", "")
_FOUND = Path(_KEEP) / "found.json"
_SHARED = "one shared directory, cold"
_EVERY = 1.0  # seconds between two looks at the job's processes
_ANOTHER_NODE = "kcoord-torchrun on another node with the same store, cold"


def run() -> Result:
    """One rank a GPU, or RANKS in all; without GPUs 4 ranks and one block. VIRTUAL=1: with ``--virtual-local-rank``.

    With KEEP=DIRECTORY a benchmark that was ended goes on there with the plan that it was at.
    """
    import torch

    adopt_orphans()
    gpus = torch.cuda.device_count()
    ranks, layers = (gpus, 12) if gpus else (_CPU["ranks"], _CPU["layers"])
    ranks, layers = (int(os.environ.get(name, given)) for name, given in (("RANKS", ranks), ("LAYERS", layers)))
    where = f"{gpus} GPUs, {ranks} ranks" if gpus else f"{ranks} ranks without a GPU"
    wide = f" of width {_WIDTH}" if _WIDTH != "0" else ""
    result = Result(
        f"Cold start of torch.compile {_WRAPPED[_WRAP]}, {_MODEL} of {layers} blocks{wide}, on {where}",
        [
            "caches", "wall s", "ratio to shared", "model s", "first step s", "codegens", "AOT traces", "C++ builds",
            "a later step ms", "its peak MB", "job's PSS MB", "processes",
        ],
    )  # fmt: skip
    imports = "import torch._inductor.compile_fx" + "; import transformers" * (_MODEL == "llama")
    subprocess.run([sys.executable, "-c", imports], check=True)  # else the first job alone reads them from disk
    found: dict[str, list[dict[str, Any]]] = json.loads(_FOUND.read_text()) if _KEEP and _FOUND.exists() else {}
    for number in range(_RUNS):
        with _place(number) as root:
            for name, launcher, count, job, caches, more in _plans(root, ranks, bool(gpus)):
                if len(found.get(name, ())) > number:
                    continue
                if "cold" in name:
                    _remove(
                        root, ["other"] if name == _ANOTHER_NODE else [caches, "local", "store"] if more else [caches]
                    )
                with _away(root, ("ours", "local") if name == _ANOTHER_NODE else ()):
                    found.setdefault(name, []).append(_once(launcher, count, layers, job, str(root / caches), more))
                print(f"  {number + 1}/{_RUNS} {name}: {found[name][-1]['wall']:.1f} s", file=sys.stderr, flush=True)
                if _KEEP:
                    _FOUND.write_text(json.dumps(found))
    shared = statistics.median(each["wall"] for each in found[_SHARED])
    for name, runs in found.items():
        largest = [str(max(each[what] for each in runs)) for what in ("pss", "processes")]
        wall = statistics.median(each["wall"] for each in runs)
        last = runs[-1]
        work = [str(last[what]) for what in ("codegens", "traces", "builds")]
        parts = [f"{statistics.median(each[part] for each in runs):.1f}" for part in ("model", "first")]
        result.rows.append([name, f"{wall:.1f}", f"{wall / shared:.2f}", *parts, *work, f"{last['step'] * 1e3:.1f}"])
        result.rows[-1] += [f"{last['peak'] / 1e6:.1f}", *largest]
    if _GIVEN:
        result.notes.append("the job has " + " ".join(_GIVEN))
    result.notes.append("with --virtual-local-rank" if _VIRTUAL else "no flag: rank N computes on cuda:N")
    result.notes.append("peak: tensors of the largest rank that are alive at once in a later step")
    result.notes.append(
        f"PSS and number of the job's processes at their most: launcher, agent, ranks, compile workers; every {_EVERY:.0f} s"
    )
    losses = {loss for name, runs in found.items() if "batch" not in name for each in runs for loss in each["losses"]}
    result.notes.append(
        f"medians of {_RUNS}; seconds of the slowest rank from barrier to barrier: model, imports, compile, one training step"
    )
    result.notes.append(
        f"first losses of all ranks and plans: {len(losses)} value{'s' * (len(losses) > 1)}, to the bit"
    )
    return result


def _plans(root: Path, ranks: int, on_gpu: bool) -> list[tuple[str, list[str], int, str, str, dict[str, str]]]:
    """(name, launcher, ranks, the job's arguments, directory of torch's caches below `root`, variables).

    ``{RANK}`` in a directory: each rank its own.
    """
    virtual = ["--virtual-local-rank"] if on_gpu and _VIRTUAL else []
    stock, ours, store = [*_STOCK, *virtual], [*_OURS, *virtual], str(root / "store")
    local = {"KCOORD_LOCAL_DIR": str(root / "local"), "KCOORD_STORE": store, "KCOORD_STORE_CREATE": "1"}
    other = {**local, "KCOORD_LOCAL_DIR": str(root / "other")}
    plans = [
        (_SHARED, stock, ranks, "", "shared", {}),
        ("kcoord-torchrun, cold", ours, ranks, "", "ours", local),
        (_ANOTHER_NODE, ours, ranks, "", "other", other),
        ("one shared directory, warm", stock, ranks, "", "shared", {}),
        ("kcoord-torchrun, warm", ours, ranks, "", "ours", local),
        ("one shared directory, another batch size", stock, ranks, f"--batch {_BATCH}", "shared", {}),
        ("kcoord-torchrun, another batch size", ours, ranks, f"--batch {_BATCH}", "ours", local),
    ]
    if _ALL:
        plans += [
            ("one rank alone, cold", _STOCK, 1, "", "alone", {}),
            ("a private directory per rank, cold", stock, ranks, "", "private{RANK}", {}),
            ("rank 0 first, then the others, cold", stock, ranks, "--mode rank0", "first", {}),
        ]
    return plans


@contextlib.contextmanager
def _place(number: int) -> Iterator[Path]:
    """The directory of one run of all plans. What an ended run had put away is back."""
    if not _KEEP:
        with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as root:
            yield Path(root)
        return
    place = Path(_KEEP) / str(number)
    place.mkdir(parents=True, exist_ok=True)
    for away in place.glob("*.away"):
        away.rename(away.with_suffix(""))
    yield place


def _remove(root: Path, names: list[str]) -> None:
    """What an ended run of a plan has left of its caches."""
    for name in names:
        for each in root.glob(name.replace("{RANK}", "*")):
            shutil.rmtree(each)


@contextlib.contextmanager
def _away(root: Path, names: tuple[str, ...]) -> Iterator[None]:
    """Directories of one node, out of another one's sight."""
    for name in names:
        (root / name).rename(root / f"{name}.away")
    yield
    for name in names:
        (root / f"{name}.away").rename(root / name)


def _once(
    launcher: list[str], ranks: int, layers: int, given: str, caches: str, more: dict[str, str]
) -> dict[str, Any]:
    command = [sys.executable, *launcher, "--standalone", "--nproc-per-node", str(ranks)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": caches, **more}
    if "KCOORD_LOCAL_DIR" not in more:
        variables["TRITON_CACHE_DIR"] = f"{caches}/triton"
    job = [
        str(_JOB),
        "--layers",
        str(layers),
        "--model",
        _MODEL,
        "--wrap",
        _WRAP,
        "--width",
        _WIDTH,
        *given.split(),
        *_GIVEN,
    ]
    if "{RANK}" in caches:
        own = caches.replace("{RANK}", "$RANK")
        shell = f'TORCHINDUCTOR_CACHE_DIR={own} TRITON_CACHE_DIR={own}/triton exec {sys.executable} "$0" "$@"'
        command += ["--no-python", "bash", "-c", shell, *job]
    else:
        command += job
    with _sampled() as most:
        found = figures("torch_compile", command, variables, timeout=600)
    return found | most


@contextlib.contextmanager
def _sampled() -> Iterator[dict[str, int]]:
    """The most memory (PSS, in MB) and processes that this one's descendants have had at once, filled while the block runs."""
    most, over = {"pss": 0, "processes": 0}, threading.Event()

    def sample() -> None:
        while not over.wait(_EVERY):
            memory = count = 0
            for each in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                    memory += each.memory_full_info().pss
                    count += 1
            most.update(pss=max(most["pss"], memory // 1_000_000), processes=max(most["processes"], count))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()
