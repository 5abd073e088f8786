"""Hosts of one machine: each with a network, process numbers, mounts and a name of its own, and a switch between them.

They are made of Linux namespaces, which end with their first process, and that ends with us: nothing is left behind, however a
test ends. Needs root, and iproute2 and util-linux.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_NETWORK = "10.77.0"
_READY = b"ready\n"


def why_not() -> str:
    """Why hosts cannot be made here; empty if they can."""
    missing = [program for program in ("ip", "unshare", "nsenter", "mount") if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)}: apt install iproute2 util-linux"
    if os.geteuid() != 0:
        return "namespaces of hosts are root's to make"
    try:
        with Network(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", b"") or b""
        return f"no namespaces: {error} {told.decode(errors='replace').strip()}"


class Host:
    """A context manager. `name` is its host name; without one it shares the machine's processes and name: a switch."""

    def __init__(self, name: str = "") -> None:
        self.name, self.address = name, ""
        self._into = ["--net", "--mount", *(["--uts", "--pid"] if name else [])]
        self._process: subprocess.Popen[bytes] | None = None
        self._first = 0

    def __enter__(self) -> Host:
        own = ["--uts", "--pid", "--fork", "--kill-child", "--mount-proc"] if self.name else []
        script = f"{f'hostname {self.name} &&' if self.name else ''} ip link set lo up && echo ready && read _"
        command = ["unshare", "--net", "--mount", "--propagation", "private", *own, "sh", "-c", script]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != _READY:
            _, told = self._process.communicate()
            raise subprocess.CalledProcessError(self._process.returncode, command, stderr=told)
        children = psutil.Process(self._process.pid).children()
        self._first = children[0].pid if self.name else self._process.pid
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process is not None
        self.vanish()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    @property
    def pid(self) -> int:
        """Its first process, as seen from outside."""
        return self._first

    def wrap(self, *, processes: bool = True) -> list[str]:
        """What goes before a command that is to run there. Without `processes` it is a process of this machine."""
        into = [space for space in self._into if processes or space != "--pid"]
        return ["nsenter", "--target", str(self._first), *into, "--"]

    def run(self, *command: str | Path) -> str:
        """Raises CalledProcessError."""
        words = [*self.wrap(processes=False), *map(str, command)]
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=20).stdout

    def vanish(self) -> None:
        """SIGKILL to all its processes at once."""
        assert self._process is not None
        if self._process.poll() is None:
            os.kill(self._first, 9)
            self._process.wait(20)


class Network:
    """A context manager: `count` hosts, numbered from 0, that reach each other over a switch."""

    def __init__(self, count: int) -> None:
        self.hosts = [Host(f"host{n}") for n in range(count)]
        self._switch = Host()
        self._entered: list[Host] = []

    def __enter__(self) -> Sequence[Host]:
        try:
            for host in (self._switch, *self.hosts):
                self._entered.append(host.__enter__())
            self._switch.run("ip", "link", "add", "br0", "type", "bridge")
            self._switch.run("ip", "link", "set", "br0", "up")
            for number, host in enumerate(self.hosts):
                self._plug_in(number, host)
        except BaseException:
            self.__exit__()
            raise
        return self.hosts

    def __exit__(self, *exc: object) -> None:
        while self._entered:
            self._entered.pop().__exit__()

    def cut(self, number: int) -> None:
        """From now on packets from and to this host vanish; its link stays up, and nobody is told."""
        self._switch.run("ip", "link", "set", f"port{number}", "nomaster")

    def heal(self, number: int) -> None:
        self._switch.run("ip", "link", "set", f"port{number}", "master", "br0")

    def restart(self, number: int) -> None:
        """A host that vanished is there again, at its address. What ran there, and was mounted there, is not."""
        host = self.hosts[number]
        host.__exit__()
        with suppress(subprocess.CalledProcessError):  # it went with the host, which may take a moment
            self._switch.run("ip", "link", "delete", f"port{number}")
        host.__enter__()
        self._plug_in(number, host)

    def _plug_in(self, number: int, host: Host) -> None:
        port, host.address = f"port{number}", f"{_NETWORK}.{number + 1}"
        self._switch.run(
            *("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        )  # fmt: skip
        self._switch.run("ip", "link", "set", port, "master", "br0", "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
