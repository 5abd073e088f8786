"""TLS in front of a server that has none, as stunnel would do it, with a certificate that can be changed."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import threading
import warnings
from pathlib import Path


class Certificates:
    """Self-signed certificates, each in one file with its key: clients are told to trust `good`, of 127.0.0.1 as `bad` is;
    `elsewhere` is another host's."""

    def __init__(self, directory: Path) -> None:
        self.good, self.bad = (self._make(directory / name) for name in ("good.pem", "bad.pem"))
        self.elsewhere = self._make(directory / "elsewhere.pem", "DNS:elsewhere.example")

    @staticmethod
    def _make(path: Path, name: str = "IP:127.0.0.1") -> Path:
        subject = ["-subj", "/CN=kcoord", "-addext", f"subjectAltName={name}", "-days", "2"]
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command = ["openssl", "req", "-x509", *key, *subject, "-keyout", str(path), "-out", f"{path}.crt"]
        subprocess.run(command, check=True, capture_output=True)
        path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
        return path


class TLSFront:
    """A context manager: a port of this host that speaks TLS, and hands what it hears to the port `behind`."""

    def __init__(self, behind: int, certificate: Path, newest: ssl.TLSVersion | None = None) -> None:
        self._behind = behind
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if newest is not None:
            self._context.set_ciphers("ALL:@SECLEVEL=0")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self._context.minimum_version = self._context.maximum_version = newest
        self._context.load_cert_chain(certificate)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    def show(self, certificate: Path) -> None:
        """From now on; connections that there are end. At no moment does nobody listen."""
        self._context.load_cert_chain(certificate)
        asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop).result(10)

    def __enter__(self) -> TLSFront:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _hang_up(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(tasks, timeout=5) if tasks else None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._behind)
        pair = {writer, there_writer}
        self._writers |= pair
        try:
            await asyncio.gather(self._pass_on(reader, there_writer), self._pass_on(there_reader, writer))
        finally:
            self._writers -= pair

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while content := await reader.read(1 << 16):
                writer.write(content)
                await writer.drain()
        writer.transport.abort()
