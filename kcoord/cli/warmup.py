"""``kcoord warmup``: compile a recorded profile before there is a job, on all cores, on any machine.

Its processes call `kcoord.warmup`: one, or, for recipes of the current GPU, one for each GPU. The first that misses a key starts
the pool.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from kcoord.cgroups import cores
from kcoord.cli.options import ALL, Parsed, agent_status, environ_with, json_flag, print_json, settings_flags
from kcoord.cli.output import echo
from kcoord.errors import KcoordError
from kcoord.keys.device import GPUTarget
from kcoord.packs.recipe import CHOICE
from kcoord.replay.profile_access import recorded
from kcoord.settings import NO_PROFILE, Settings, variable
from kcoord.telemetry.spans import plain_text
from kcoord_launch.checks import checked_settings
from kcoord_launch.environment import job_name, with_variables
from kcoord_launch.supervise import supervised

_LONGEST_LINE = 2000
_STORE_STANDS_STILL = 120.0  # seconds; one that takes nothing for so long is given up
_ASK_AGAIN = 0.1  # seconds


def _target(text: str) -> str:
    GPUTarget.parse(text)
    return text


@click.command("warmup")
@click.argument("name")
@click.option("--target", "targets", multiple=True, type=Parsed("target", _target), help="Compile for this GPU "
              "(cuda:90, hip:gfx942) instead of the recorded ones; may be repeated. No GPU is needed.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1), help="Processes that compile, at most. Default: one for each core.")
@json_flag
@settings_flags(*ALL)
def command(name: str, targets: tuple[str, ...], workers: int | None, as_json: bool, **flags: str | None) -> None:
    """Compile the kernels of profile NAME, which a job recorded (kcoord-torchrun --kcoord-profile NAME), before the next job.

    Start it where the job's modules can be imported: in the directory of its script, or with PYTHONPATH. A kernel that cannot be
    compiled is named and skipped. Exit code 1 if none can be compiled, or if there was no agent to take them.
    """
    settings = checked_settings(flags, is_job=False)
    if settings.disable:
        echo("kcoord: KCOORD_DISABLE is set: nothing is compiled", err=True)
        return
    recipes = recorded(settings, name)
    most = workers or int(cores())
    one_each = gpus() if not targets and any(not r.target and r.backend != CHOICE for r in recipes) else [{}]
    begun = time.perf_counter()
    processes: list[subprocess.Popen[str]] = []
    _end_on_signals()
    with supervised(settings, job_name(settings), sums_up=False) as beside:
        if beside.get(variable("disable")) == "1":
            raise KcoordError("there is no agent to take what would be compiled (see above)")
        environment = with_variables(beside, environ_with(flags))
        environment[variable("profile")] = NO_PROFILE  # a warm-up records nothing
        try:
            for rank, gpu in enumerate(one_each[:most]):
                ours = {**environment, **gpu, "RANK": str(rank), "WORLD_SIZE": str(len(one_each[:most]))}
                shows = str(int(not as_json and not rank))
                processes.append(_started([name, str(max(0, most - len(one_each))), shows, *targets], ours))
            said = [process.stdout.read() for process in processes if process.stdout is not None]
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.terminate()
                process.wait()
        left = _uploaded(settings)
    if any(codes):
        ended = next(code for code in codes if code)
        raise KcoordError(
            f"{sum(map(bool, codes))} of {len(codes)} processes ended early, with exit code {ended} (see above)"
        )
    reports = [json.loads(each) for each in said]
    summary = _summary(reports, time.perf_counter() - begun)
    failed = summary["failed"]
    if as_json:
        print_json(summary)
    else:
        for item in failed:
            echo(plain_text(f"skipped {item['name']}: {item['reason']}", _LONGEST_LINE), err=True)
        echo(
            f"{summary['keys']} keys: {summary['compiled']} compiled, {summary['loaded']} loaded, {len(failed)} skipped, "
            f"in {summary['seconds']:.1f} s"
        )
    if failed and not summary["keys"]:
        absent = any("ModuleNotFoundError" in item["reason"] for item in failed)
        remedy = "start this where the job's modules can be imported, as in its directory" if absent else "see above"
        raise KcoordError(f"no key could be compiled: {remedy}")
    alone = sum(report["alone"] for report in reports)
    if alone and left is None:
        raise KcoordError(f"{alone} of these compiles are not shared: there is no agent (see above)")
    if left:
        raise KcoordError(f"{left} kernels did not get into the store, which takes too long: run this again")


def gpus() -> list[dict[str, str]]:
    """For each GPU that this process may use, the variables that hide the others; ``[{}]`` without a GPU."""
    for variable_of_maker in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if variable_of_maker in os.environ:
            numbers = [each for each in os.environ[variable_of_maker].split(",") if each.strip()]
            return [{variable_of_maker: each} for each in numbers] or [{}]
    cuda = len(list(Path("/dev").glob("nvidia[0-9]*")))
    hip = [node.read_text().strip() for node in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")]
    shown = [{"CUDA_VISIBLE_DEVICES": str(n)} for n in range(cuda)]
    shown += [{"HIP_VISIBLE_DEVICES": str(n)} for n in range(sum(each not in ("", "0") for each in hip))]
    return shown or [{}]


def _uploaded(settings: Settings) -> int | None:
    """Wait until the store has what was compiled; the number of artifacts that it does not take. None: there is no agent."""
    fewest, since = math.inf, time.monotonic()
    while (status := agent_status(settings)) is not None:
        left = int(status["uploads"])
        if left < fewest:
            fewest, since = left, time.monotonic()
        if not left or time.monotonic() > since + _STORE_STANDS_STILL:
            return left
        time.sleep(_ASK_AGAIN)
    return None


def _end_on_signals() -> None:
    """SIGTERM and SIGHUP, unless they are ignored, end this process as SIGINT does, so that it ends those that it started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


def _started(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "kcoord.replay", *arguments]
    try:
        return subprocess.Popen(program, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    except OSError as error:  # a container's limit of processes, say
        raise KcoordError(f"a process cannot be started: {error.strerror}: ask for fewer --workers") from error


def _summary(reports: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    failed = {name: reason for report in reports for name, reason in report["failed"]}
    keys = max(r["compiled"] + r["loaded"] + r["left"] for r in reports)
    compiled = sum(r["compiled"] for r in reports)
    return {
        "keys": keys,
        "compiled": compiled,
        "loaded": max(0, keys - compiled),
        "failed": [{"name": n, "reason": r} for n, r in sorted(failed.items())],
        "seconds": seconds,
    }
