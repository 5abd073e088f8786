"""A real Slurm of two nodes on this machine, for tests: munged, slurmctld and two slurmd, in a directory and on ports of its own.

It needs no service, no configuration of the machine, and no root; only the programs (Debian: `apt-get install slurmctld slurmd
slurm-client munge`), with slurmd built to run several times on one machine, as Debian's is.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.ports import reserve_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_READY_WITHIN = 30.0  # seconds
NODES = ("n1", "n2")
KILL_WAIT = 10  # seconds between SIGTERM and SIGKILL of a cancelled job


def missing() -> str | None:
    """What this machine lacks for it, or None."""
    lacks = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"no {', '.join(lacks)} on PATH" if lacks else None


class SlurmCluster:
    """A context manager. `environment` is what Slurm's commands need; each of its two nodes has 8 processors.

    Tasks on a node get ``KCOORD_LOCAL_DIR/<node>`` as their local directory, as two machines would have one each.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._processes: list[subprocess.Popen[bytes]] = []
        self.environment = {"SLURM_CONF": str(root / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def command(self, *words: str, timeout: float = 60.0) -> str:
        """One of Slurm's commands; its output. Raises CalledProcessError."""
        done = subprocess.run(
            words, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=timeout, check=True
        )
        return done.stdout

    def state(self, job: str) -> str:
        """``RUNNING``, ``COMPLETED`` …"""
        return self._of(job, r"JobState=(\w+)")

    def exit_code(self, job: str) -> int:
        """The batch script's."""
        return int(self._of(job, r" ExitCode=(\d+):"))

    def _of(self, job: str, pattern: str) -> str:
        shown = self.command("scontrol", "show", "job", "-o", job)
        found = re.search(pattern, shown)
        assert found is not None, shown
        return found.group(1)

    def _start(self) -> None:
        root, user = self._root, getpass.getuser()
        munge = root / "munge"
        for directory in (root / "state", munge):
            directory.mkdir(parents=True)
            directory.chmod(0o700)
        (munge / "key").write_bytes(secrets.token_bytes(1024))
        (munge / "key").chmod(0o400)
        prolog = root / "task-prolog"
        prolog.write_text(  # Slurm runs it for the batch script, too, whose tasks inherit its environment
            '#!/bin/sh\n[ -z "$SLURM_STEP_ID" ] || echo "export KCOORD_LOCAL_DIR=$KCOORD_LOCAL_DIR/$SLURMD_NODENAME"\n'
        )
        prolog.chmod(0o755)
        control, *ports = (reserve_port() for _ in range(1 + len(NODES)))
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={platform.node()} NodeAddr=127.0.0.1 Port={port} CPUs=8 State=UNKNOWN"
            for name, port in zip(NODES, ports, strict=True)
        )
        (root / "slurm.conf").write_text(
            f"ClusterName=test\nSlurmctldHost={platform.node()}(127.0.0.1)\nSlurmctldPort={control}\n"
            f"SlurmUser={user}\nSlurmdUser={user}\nAuthType=auth/munge\nAuthInfo=socket={munge}/socket\nCredType=cred/munge\n"
            f"StateSaveLocation={root}/state\nSlurmdSpoolDir={root}/spool-%n\n"
            f"SlurmctldPidFile={root}/slurmctld.pid\nSlurmdPidFile={root}/slurmd-%n.pid\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSchedulerParameters=bf_interval=1\nSwitchType=switch/none\nMpiDefault=none\n"
            "SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\nJobAcctGatherType=jobacct_gather/none\n"
            f"AccountingStorageType=accounting_storage/none\nKillWait={KILL_WAIT}\nReturnToService=2\n"
            f"SlurmdParameters=config_overrides\nTaskProlog={prolog}\n{nodes}\n"
            f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP\n"
        )
        self._run("munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
                  f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed")  # fmt: skip
        self._until(lambda: (munge / "socket").exists(), "munged listens")
        self._run("slurmctld", "-D")
        for name in NODES:
            self._run("slurmd", "-D", "-N", name)
        self._until(lambda: self._idle_nodes() == len(NODES), "all nodes are idle")

    def _run(self, program: str, *arguments: str) -> None:
        path = shutil.which(program, path=_PATH)
        assert path is not None
        with (self._root / f"log-{len(self._processes)}").open("wb") as log:
            # what the daemons are started with, tasks may inherit
            plain = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "KCOORD_", "TRITON_"))}
            environment = {**plain, **self.environment}
            self._processes.append(
                subprocess.Popen([path, *arguments], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def _idle_nodes(self) -> int:
        with contextlib.suppress(subprocess.CalledProcessError):
            return self.command("sinfo", "-h", "-N", "-o", "%T").split().count("idle")
        return 0

    def _until(self, condition: object, what: str) -> None:
        assert callable(condition)
        deadline = time.monotonic() + _READY_WITHIN
        while not condition():
            ended = [p.args for p in self._processes if p.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(p.read_text(errors="replace")[-2000:] for p in sorted(self._root.glob("log-*")))
                raise RuntimeError(f"Slurm did not start ({what}; ended: {ended}):\n{logs}")
            time.sleep(0.05)


@contextlib.contextmanager
def slurm_cluster(root: Path) -> Iterator[SlurmCluster]:
    with SlurmCluster(root) as cluster:
        yield cluster
