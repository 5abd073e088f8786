"""A process of its own with lease files, as another agent has it: the test says what to do, line by line.

``python -m tests.unit.leases.other_agent STORE TTL`` reads ``COMMAND ARGUMENTS…`` and answers each with one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import Lease, Ready, Wait, await_turn, probe
from kcoord.leases.files import FileLeases
from tests.unit.leases.by_token import ByToken

ROOT = Path(__file__).resolve().parents[3]
BOUND = 20.0  # seconds


class OtherAgent:
    """`start` and `answer` are the two halves of `ask`. Leaving it ends the process, whatever state it is in."""

    def __init__(self, store: Path, ttl: float = 30.0, **environ: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.leases.other_agent", str(store), str(ttl)],
            cwd=ROOT, env={**os.environ, **environ}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.pid = self._process.pid

    def start(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], BOUND)[0], "the other agent does not answer"
        return json.loads(self._process.stdout.readline())

    def ask(self, *words: object) -> Any:
        self.start(*words)
        return self.answer()

    def signal(self, number: int) -> float:
        """Send it; the moment (`time.monotonic`, which is one clock for all processes) before it."""
        moment = time.monotonic()
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED)
        elif number == signal.SIGKILL:
            self._process.wait()  # one that nobody waits for still has its pid
        return moment

    def __enter__(self) -> OtherAgent:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()


async def _obey(service: ByToken, words: list[str]) -> Any:
    command, key, *rest = words
    if command == "acquire":
        return _told(await service.acquire(key, *rest))
    if command == "await":
        answer = await await_turn(service.service, key, *rest)
        return [*_told(answer), time.monotonic()]
    if command == "renew":
        return await service.renew(key, *rest)
    if command == "release":
        return await service.release(key, *rest)
    if command == "ready":
        return await service.ready(key, *rest)
    if command == "ping":
        return await probe(service.service)
    if command == "lead":  # so many times; the intervals in which it did
        led = []
        for n in range(int(rest[0])):
            token = f"{os.getpid()}.{n}"
            lease = await await_turn(service.service, key, token, token)
            assert isinstance(lease, Lease)
            began = time.monotonic()
            await asyncio.sleep(random.uniform(0.002, 0.01))
            led.append((began, time.monotonic()))
            await lease.release()
        return led
    assert command == "keep", command  # a lease that is renewed until the process ends
    answer = await service.acquire(key, *rest)
    assert isinstance(answer, Lease)
    answer.keep_alive(service.service._ttl)  # type: ignore[attr-defined]
    return _told(answer)


def _told(answer: object) -> list[Any]:
    facts = {Lease: ("token", "holder"), Ready: ("manifest",), Wait: ("holder", "ttl")}.get(type(answer), ())
    return [type(answer).__name__, *(getattr(answer, f) for f in facts)]


async def _main(store: Path, ttl: float) -> None:
    service = ByToken(FileLeases(store, ttl=ttl, limit=300.0, failure_ttl=30.0))
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        began = time.monotonic()
        try:
            said = await _obey(service, line.decode().split())
        except LeaseUnavailable as error:
            said = ["LeaseUnavailable", str(error), time.monotonic() - began]
        print(json.dumps(said), flush=True)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), float(sys.argv[2])))
