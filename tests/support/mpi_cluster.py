"""Two hosts for mpirun: each with a network, process numbers, a name and local disks of its own, a store between them, and a
remote shell that leads from one to the other.

They are namespaces of this machine (`tests.support.hosts`). The remote shell stands in for ssh: as there, the command is a line
for the other host's shell, which has a login's environment and nothing of the caller's.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.hosts import Host, Network
from tests.support.redis_server import RedisServer
from tests.support.sandbox import Sandbox

NODES, RANKS = 2, 2  # ranks of a node
PASSWORD = f"hunter2-{secrets.token_hex(8)}"  # of Redis; no process that runs beside the test has it
_LOGIN = {
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/sh",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
}
_CLIENT = """#!{python} -IS
import json, socket, sys
words = sys.argv[1:]
while words[0].startswith("-"):  # ssh's own options
    del words[0]
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [json.dumps(words).encode()], [0, 1, 2])
    sys.exit(int(server.recv(16) or 255))
"""


@dataclass(frozen=True)
class Mpi:
    """An MPI: its recipe; its launcher, by the `names` it may have and what it says its version is; how hosts are named to it."""

    kind: str
    script: str
    names: tuple[str, ...]
    version: str
    option: str
    line: str
    libraries: str  # with commas between

    def find(self) -> str | None:
        """Its path. Several MPIs call theirs ``mpirun``."""
        for name in self.names:
            path = shutil.which(name)
            if path is not None:
                done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
                if self.version in done.stdout:
                    return path
        return None

    def hosts_of(self, hosts: Sequence[Host], into: Path) -> list[str]:
        """The options that name `hosts`."""
        into.write_text("".join(self.line.format(host.name, RANKS) for host in hosts))
        return [self.option, str(into)]


_HYDRA = ("mpiexec", "mpiexec.hydra")
KINDS = (
    Mpi(
        "Open MPI",
        "openmpi.sh",
        ("mpirun", "mpirun.openmpi"),
        "Open MPI",
        "--hostfile",
        "{} slots={}\n",
        "libmpi.so.40",
    ),
    Mpi("MPICH", "mpich.sh", _HYDRA, "HYDRA", "-f", "{}:{}\n", "libmpich.so.12,libmpi.so.12"),
    Mpi("Intel MPI", "mpich.sh", _HYDRA, "Intel(R) MPI", "-f", "{}:{}\n", "libmpi.so.12"),
)
AS_ROOT = {  # Open MPI 4 and 5 want to be asked twice
    f"{mpi}_ALLOW_RUN_AS_ROOT{twice}": "1" for mpi in ("OMPI", "PRTE") for twice in ("", "_CONFIRM")
}


class MpiCluster:
    """A context manager. `environment` is what a launcher needs; `url` is Redis', on a third host and with a password."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._root, self._local = sandbox.root, sandbox.local
        self._network = Network(NODES + 1)
        self._stack = contextlib.ExitStack()
        self.nodes: list[Host] = self._network.hosts[:NODES]
        shell = str(self._root / "rsh")
        self.environment = {
            **AS_ROOT,
            "OMPI_MCA_plm_rsh_agent": shell,  # Open MPI 4
            "PRTE_MCA_plm_ssh_agent": shell,  # Open MPI 5
            "HYDRA_LAUNCHER_EXEC": shell,  # MPICH
            "HYDRA_LAUNCHER": "ssh",
            "I_MPI_HYDRA_BOOTSTRAP_EXEC": shell,  # Intel MPI
            "I_MPI_HYDRA_BOOTSTRAP": "ssh",
        }

    def __enter__(self) -> MpiCluster:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_RemoteShell(self._root / "rsh", self.nodes))
            hosts = stack.enter_context(self._network)
            names = [f"{host.address} {host.name}" for host in hosts]
            (self._root / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
            self._local.mkdir(exist_ok=True)
            for node in self.nodes:
                node.run("mount", "--bind", self._root / "hosts", "/etc/hosts")
                for disk in (self._local, self._root / "tmp"):
                    node.run("mount", "-t", "tmpfs", "-o", "mode=700", "none", disk)
            options = ["--bind", "0.0.0.0", "--protected-mode", "no"]
            wrap = hosts[NODES].wrap(processes=False)
            redis = stack.enter_context(RedisServer(tcp=True, password=PASSWORD, wrap=wrap, options=options))
            self.url = f"redis://:{PASSWORD}@{hosts[NODES].address}:{redis.port}/0"
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def start(self, *command: str, environment: dict[str, str]) -> subprocess.Popen[str]:
        """`command`, on the first node."""
        words = [*self.nodes[0].wrap(), "env", "-C", str(self._root), *command]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            words,
            env={**environment, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    def processes(self, *numbers: int) -> list[psutil.Process]:
        """All that run on these nodes, or on all, but what holds them up."""
        spaces = {_space(self.nodes[n].pid): self.nodes[n].pid for n in numbers or range(NODES)}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                first = spaces.get(_space(process.pid))
                if first not in (None, process.pid) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def sockets(self) -> list[Path]:
        """Of agents, on all nodes."""
        return [path for node in self.nodes for path in Path(f"/proc/{node.pid}/root{self._local}").glob("**/*.sock")]


def _space(pid: int) -> str:
    """The space of process numbers that `pid` is in."""
    return str(Path(f"/proc/{pid}/ns/pid").readlink())


class _RemoteShell:
    """A context manager: the program at `path` runs a command on one of `hosts`. These must end before it does."""

    def __init__(self, path: Path, hosts: Sequence[Host]) -> None:
        by_name = {host.name: host for host in hosts}

        class Login(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                message, streams, _, _ = socket.recv_fds(self.request, 1 << 16, 3)
                try:
                    name, *words = json.loads(message)
                    command = [*by_name[name].wrap(), "env", "-i", "sh", "-c", " ".join(words)]
                    command[-3:-3] = [f"{k}={v}" for k, v in _LOGIN.items()]
                    with subprocess.Popen(command, stdin=streams[0], stdout=streams[1], stderr=streams[2]) as process:
                        code = process.wait()
                finally:
                    for stream in streams:
                        os.close(stream)
                with contextlib.suppress(OSError):  # whoever asked may have ended
                    self.request.sendall(str(code if code >= 0 else 255).encode())

        address = f"{path}.sock"
        self._server = socketserver.ThreadingUnixStreamServer(address, Login)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        path.write_text(_CLIENT.format(python=sys.executable, address=address))
        path.chmod(0o755)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()  # and its threads
