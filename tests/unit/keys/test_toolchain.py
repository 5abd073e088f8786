"""Tools by their content, looked at live and hashed once per machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kcoord.keys.tools import machine_cache, toolchain
from kcoord.keys.tools.toolchain import fingerprint, tool_factors, tools
from tests.support.sandbox import eventually, finish

_ROOT = Path(__file__).parents[3]


class Hashes:
    """Which files were read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[str] = []
        self._original = machine_cache.hash_file
        monkeypatch.setattr(toolchain, "hash_file", self._hash)

    def _hash(self, path: Path) -> tuple[str, machine_cache.Stamp | None]:
        self.paths.append(path.name)
        return self._original(path)


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> Hashes:
    return Hashes(monkeypatch)


@pytest.fixture(autouse=True)
def _another_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the compilers of this machine."""
    monkeypatch.setattr(toolchain, "_known", {})
    monkeypatch.setattr(toolchain, "_listings", {})
    monkeypatch.setenv("PATH", str(tmp_path / "path"))


@pytest.fixture
def old_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of which a change must show, however young they are."""
    monkeypatch.setattr(machine_cache, "_RACY", -1)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


def forget() -> None:
    """As a new process of this machine starts."""
    toolchain._known.clear()
    toolchain._listings.clear()


def script(path: Path, body: str = "echo tool 1.0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def sha256(path: Path, local: Path) -> str:
    tool = fingerprint(path, local)
    assert tool is not None
    return tool.sha256


def test_content_identifies_a_tool_and_its_place_does_not(tmp_path: Path, local: Path) -> None:
    one, same, other = (script(tmp_path / d / "ptxas", body) for d, body in (("a", "1"), ("b", "1"), ("c", "2")))
    assert fingerprint(one, local) == fingerprint(same, local) != fingerprint(other, local)
    assert sha256(one, local) == machine_cache.hash_file(one)[0]


_CHANGES: dict[str, Callable[[Path], object]] = {
    "written in place": lambda p: p.write_text("#!/bin/sh\nfalse\n"),
    "replaced by a rename": lambda p: script(p.with_name("new"), "false").replace(p),
    "of the same size, with its mtime set back": lambda p: _same_size_and_time(p),
    "removed and written again": lambda p: (p.unlink(), script(p, "false")),
    "a link to another file": lambda p: (p.unlink(), p.symlink_to(script(p.with_name("new"), "false"))),
}


def _same_size_and_time(path: Path) -> None:
    found = path.stat()
    path.write_text(path.read_text().replace("1", "2"))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (found.st_size, found.st_mtime_ns)


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("what", _CHANGES)
def test_a_tool_that_is_replaced_is_noticed_by_the_next_look(tmp_path: Path, local: Path, what: str) -> None:
    path = script(tmp_path / "ptxas")
    before = sha256(path, local)
    eventually(lambda: time.time_ns() > path.stat().st_ctime_ns + 20_000_000)  # the file system's clock has moved on
    _CHANGES[what](path)
    after = sha256(path, local)
    assert after != before
    forget()
    assert sha256(path, local) == after


def test_a_young_file_is_not_trusted_although_its_stamp_has_not_changed(
    tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git's racy file: written again within one tick of the file system's clock, it would keep its stamp."""
    path = script(tmp_path / "ptxas", "echo 1")
    stamp = machine_cache.stamp_of(path.stat())
    for module in (machine_cache, toolchain):
        monkeypatch.setattr(module, "stamp_of", lambda found: stamp)
    one = sha256(path, local)
    script(path, "echo 2")
    assert sha256(path, local) != one
    assert list((local / "toolchain").glob("tool-*[0-9a-f]")) == []


@pytest.mark.usefixtures("old_files")
def test_the_second_process_reads_nothing(tmp_path: Path, local: Path, hashes: Hashes) -> None:
    path = script(tmp_path / "ptxas")
    first = sha256(path, local)
    for _ in range(3):
        forget()
        assert sha256(path, local) == first
        assert sha256(path, local) == first
    assert hashes.paths == ["ptxas"]


def test_a_link_is_what_it_leads_to(tmp_path: Path, local: Path) -> None:
    path = script(tmp_path / "cuda-13" / "ptxas")
    link = tmp_path / "ptxas"
    link.symlink_to(path)
    tool = fingerprint(link, local)
    assert tool is not None
    assert tool.path == str(path)
    assert tool == fingerprint(path, local)


def _truncate(entry: Path) -> None:
    os.truncate(entry, entry.stat().st_size - 5)


def _flip(entry: Path) -> None:
    content = bytearray(entry.read_bytes())
    content[-10] ^= 1
    entry.write_bytes(content)


def _become_a_directory(entry: Path) -> None:
    entry.unlink()
    entry.mkdir()


_TEARS: list[Callable[[Path], object]] = [
    _truncate,
    _flip,
    _become_a_directory,
    lambda entry: entry.write_bytes(b""),
    lambda entry: entry.write_text('{"sha256": "of somebody else"}'),
]


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("tear", _TEARS)
def test_a_torn_or_foreign_entry_is_ignored_and_written_again(
    tmp_path: Path, local: Path, hashes: Hashes, tear: Callable[[Path], object]
) -> None:
    path = script(tmp_path / "ptxas")
    first = sha256(path, local)
    (entry,) = (p for p in (local / "toolchain").glob("tool-*") if p.suffix != ".lock")
    tear(entry)
    forget()
    assert sha256(path, local) == first
    assert hashes.paths == ["ptxas", "ptxas"]
    if entry.is_file():
        forget()
        assert sha256(path, local) == first
        assert hashes.paths == ["ptxas", "ptxas"]


def _is_a_file(local: Path) -> None:
    local.write_text("")


def _is_everybodys(local: Path) -> None:
    local.mkdir()
    local.chmod(0o777)


def _nothing_can_be_written(local: Path) -> None:
    """For root, too, whom a mode does not stop."""
    entry = "tool-" + hashlib.sha256(os.fsencode(local.parent / "ptxas")).hexdigest()[:32]
    for name in (entry, f"{entry}.lock"):
        (local / "toolchain" / name).mkdir(parents=True)
    local.chmod(0o700)


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("refuse", [_is_a_file, _is_everybodys, _nothing_can_be_written])
def test_a_disk_that_refuses_costs_work_and_nothing_else(
    tmp_path: Path, local: Path, hashes: Hashes, refuse: Callable[[Path], object]
) -> None:
    path = script(tmp_path / "ptxas")
    refuse(local)
    expected = machine_cache.hash_file(path)[0]
    for _ in range(2):
        forget()
        assert sha256(path, local) == expected
        assert sha256(path, local) == expected
    assert hashes.paths == ["ptxas", "ptxas"]


def test_a_missing_tool_is_absent_and_seen_when_it_appears(tmp_path: Path, local: Path) -> None:
    path = tmp_path / "bin" / "ptxas"
    assert fingerprint(path, local) is None
    assert tools([str(path)], local) == {}
    path.parent.mkdir()
    assert fingerprint(path, local) is None
    script(path)
    assert fingerprint(path, local) is not None
    path.unlink()
    assert fingerprint(path, local) is None


def test_what_is_no_file_is_no_tool(tmp_path: Path, local: Path) -> None:
    os.mkfifo(tmp_path / "fifo")  # to open it would wait for ever
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for name in ("fifo", "directory", "loop", "nul\0"):
        assert fingerprint(f"{tmp_path}/{name}", local) is None


def cuda(home: Path) -> Path:
    """A CUDA directory, as far as it concerns code."""
    for name in ("bin/nvcc", "bin/ptxas", "bin/fatbinary", "nvvm/bin/cicc"):
        script(home / name)
    (home / "nvvm" / "libdevice").mkdir()
    (home / "nvvm" / "libdevice" / "libdevice.10.bc").write_bytes(b"BC")
    return home


@pytest.mark.parametrize("part", ["bin/nvcc", "bin/ptxas", "nvvm/bin/cicc", "nvvm/libdevice/libdevice.10.bc"])
def test_nvcc_is_also_what_it_runs(tmp_path: Path, local: Path, part: str) -> None:
    home = cuda(tmp_path / "cuda")
    nvcc = str(home / "bin" / "nvcc")
    before = tools([nvcc], local)
    assert list(before) == ["nvcc", "nvcc/cicc", "nvcc/libdevice.10.bc", "nvcc/fatbinary", "nvcc/ptxas"]
    (home / part).write_text("#!/bin/sh\nanother\n")
    after = tools([nvcc], local)
    assert [label for label in before if before[label] != after[label]] == [
        "nvcc" if part == "bin/nvcc" else f"nvcc/{Path(part).name}"
    ]


@pytest.mark.usefixtures("old_files")
def test_what_a_wrapper_script_names_counts(tmp_path: Path, local: Path) -> None:
    """As Debian's ``/usr/bin/nvcc`` does; the wrapper itself never changes."""
    home = cuda(tmp_path / "toolkit")
    wrapper = script(tmp_path / "bin" / "nvcc", f'exec "{home}/bin/nvcc" "$@"')
    before = tools([str(wrapper)], local)
    assert {"nvcc", "nvcc/nvcc", "nvcc/nvcc/cicc"} <= before.keys()
    eventually(lambda: time.time_ns() > (home / "nvvm/bin/cicc").stat().st_ctime_ns + 20_000_000)
    script(home / "nvvm/bin/cicc", "another")
    after = tools([str(wrapper)], local)
    assert before["nvcc/nvcc/cicc"] != after["nvcc/nvcc/cicc"]
    forget()
    assert tools([str(wrapper)], local) == after, "and a kept entry knows what the script names"


_WRAPPERS: dict[str, tuple[str, str]] = {
    "a name on PATH": ('exec realcc "$@"', "path/realcc"),
    "the next one of its name on PATH": ('PATH={home}/path exec mycc "$@"', "path/mycc"),
    "one beside it": ('exec "$(dirname "$0")/realcc" "$@"', "bin/realcc"),
    "one beside it, that a link leads to": ('exec "$(dirname "$(readlink -f "$0")")/realcc"', "bin/realcc"),
    "one beside the link that leads to it": ('exec "$(dirname "$0")/opt/cc" "$@"', "opt/cc"),
    "one beside it, by a computed name": ('exec "${{0%/*}}/real$(echo cc)" "$@"', "bin/realcc"),
    "one in a directory beside it": ('exec "$(dirname "$0")/../libexec/realcc" "$@"', "libexec/realcc"),
    "a path in a variable": ('REAL={home}/opt/cc\nexec "$REAL" "$@"', "opt/cc"),
    "its own directory in a variable": (
        'HERE=$(cd "$(dirname "$0")" && pwd)\nREAL=$HERE/realcc\nexec "$REAL" "$@"', "bin/realcc",
    ),
    "a directory and a name": ('ROOT={home}/opt\nNAME=cc\nexec "$ROOT/bin/$NAME" "$@"', "opt/bin/cc"),
    "a PATH that it sets": ('PATH={home}/opt/bin:$PATH\nexec cc "$@"', "opt/bin/cc"),
    "a default": ('exec "${{UNSET:-realcc}}" "$@"', "path/realcc"),
    "another default": ('exec ${{UNSET-realcc}} "$@"', "path/realcc"),
    "a variable of the environment": ('exec "$REAL_PATH" "$@"', "opt/cc"),
    "a name in the environment": ('exec ${{REAL_NAME:-false}} "$@"', "path/realcc"),
    "a directory in the environment": ('exec "$REAL_ROOT/bin/cc" "$@"', "opt/bin/cc"),
    "one in the home directory": ('exec ~/bin/cc "$@"', "opt/bin/cc"),
    "the settings that it reads": ('. "${{0%/*}}/settings"\nexec "$WHAT" "$@"', "opt/cc"),
    "a program of Python": ("exec {python} -c 'import os; os.execvp(\"realcc\", [\"realcc\"])'", "path/realcc"),
}  # fmt: skip
"""Bodies of a script ``bin/mycc``, and what it runs."""


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("path/realcc", "path/mycc", "bin/realcc", "bin/mycc", "libexec/realcc", "opt/cc", "opt/bin/cc"):
        script(tmp_path / name, f"echo {name} 1")
    monkeypatch.setenv("PATH", f"{tmp_path}/path:/usr/bin:/bin")
    for name, value in {"PATH": "opt/cc", "ROOT": "opt"}.items():
        monkeypatch.setenv(f"REAL_{name}", f"{tmp_path}/{value}")
    monkeypatch.setenv("REAL_NAME", "realcc")
    monkeypatch.setenv("HOME", f"{tmp_path}/opt")
    return tmp_path


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("what", _WRAPPERS)
def test_a_wrapper_is_also_what_it_runs(surroundings: Path, local: Path, what: str, hashes: Hashes) -> None:
    body, real = _WRAPPERS[what]
    wrapper = script(surroundings / "bin" / "mycc", body.format(home=surroundings, python=sys.executable))
    if "settings" in what:
        (surroundings / "bin" / "settings").write_text(f"WHAT={surroundings}/opt/cc\n")
    if "link" in what:
        link = surroundings / "mycc"
        link.symlink_to(wrapper)
        wrapper = link

    def output() -> str:
        return subprocess.run([wrapper], capture_output=True, text=True, check=True).stdout

    before = tools([str(wrapper)], local)
    assert output() == f"{real} 1\n", "and this is what the wrapper runs"
    forget()
    hashes.paths.clear()
    assert tools([str(wrapper)], local) == before
    assert hashes.paths == [], "unchanged, nothing is read"
    script(surroundings / real, f"echo {real} 22")
    assert output() == f"{real} 22\n"
    assert tools([str(wrapper)], local) != before


def test_variables_that_a_script_reads_count_by_their_values(
    surroundings: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODE", raising=False)
    wrapper = script(surroundings / "bin" / "mycc", 'exec realcc ${MODE:-fast} "$PWD" "$@"')
    found = [tools([wrapper], local)]
    for value in ("slow", "slower"):
        monkeypatch.setenv("MODE", value)
        found.append(tools([wrapper], local))
    assert [("mycc/$MODE" in each) for each in found] == [False, True, True]
    assert found[1]["mycc/$MODE"] != found[2]["mycc/$MODE"]
    monkeypatch.setenv("PWD", "/elsewhere")
    monkeypatch.setenv("OTHER", "x")
    assert tools([wrapper], local) == found[2]


@pytest.mark.usefixtures("old_files")
def test_of_a_directory_of_many_programs_those_that_a_script_names_count(
    surroundings: Path, local: Path, hashes: Hashes
) -> None:
    """As in ``/usr/bin``."""
    for number in range(40):
        script(surroundings / "bin" / f"program{number}", "echo 1")
    wrapper = script(surroundings / "bin" / "mycc", 'exec "${0%/*}/program7" "$@"  # and no other')
    before = tools([wrapper], local)
    assert sorted(hashes.paths) == ["mycc", "program7"]
    script(surroundings / "bin" / "program8", "echo 22")
    assert tools([wrapper], local) == before
    script(surroundings / "bin" / "program7", "echo 22")
    assert tools([wrapper], local) != before


def test_outputs_of_the_job_beside_a_script_do_not_count(surroundings: Path, local: Path) -> None:
    """A checkpoint beside one that does not ask where it lies, and the script's own log."""
    for name, body, output in (
        ("mycc", f"exec {surroundings}/opt/cc", "weights"),
        ("yourcc", 'echo >> "$0.log"', "yourcc.log"),
    ):
        wrapper = script(surroundings / "bin" / name, body)
        before = tools([wrapper], local)
        (surroundings / "bin" / output).write_text("step 1")
        assert tools([wrapper], local) == before


def test_a_program_that_appears_on_path_for_a_wrapper_is_seen(surroundings: Path, local: Path) -> None:
    (surroundings / "path" / "realcc").unlink()
    (surroundings / "bin" / "realcc").unlink()
    wrapper = script(surroundings / "bin" / "mycc", 'exec realcc "$@"')
    before = tools([wrapper], local)
    script(surroundings / "path" / "realcc", "echo 2")
    assert tools([wrapper], local) != before


def test_a_young_directory_is_listed_again_although_its_stamp_has_not_changed(
    surroundings: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = machine_cache.stamp_of((surroundings / "path").stat())
    monkeypatch.setattr(toolchain, "stamp_of", lambda found: stamp)
    wrapper = script(surroundings / "bin" / "mycc", 'exec yourcc "$@"')
    assert list(tools([wrapper], local)) == ["mycc"]
    script(surroundings / "path" / "yourcc")
    assert list(tools([wrapper], local)) == ["mycc", "mycc/yourcc"]


def test_a_launcher_that_a_link_calls_a_compiler_is_also_the_next_one_on_path(
    tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``/usr/lib/ccache/g++``."""
    ccache, real = tmp_path / "bin" / "ccache", script(tmp_path / "usr" / "g++", "echo 1")
    ccache.parent.mkdir()
    ccache.write_bytes(b"\x7fELF\0")
    ccache.chmod(0o755)
    (tmp_path / "shims").mkdir()
    (tmp_path / "shims" / "g++").symlink_to(ccache)
    monkeypatch.setenv("PATH", f"{tmp_path}/shims:{tmp_path}/usr")
    before = tools(["g++"], local)
    assert list(before) == ["g++", "g++/g++"]
    script(real, "echo 2")
    assert tools(["g++"], local) != before


def gcc(home: Path) -> str:
    """The driver of this machine's g++, installed in `home`, and a pass of its own."""
    driver = Path(os.path.realpath(shutil.which("g++", path="/usr/bin") or pytest.skip("no g++")))
    asked = subprocess.run([driver, "-print-prog-name=cc1plus"], capture_output=True, text=True, check=True)
    passes = Path(asked.stdout.strip()).parent
    (home / "bin").mkdir(parents=True)
    shutil.copy(driver, home / "bin" / "g++")
    script(home / passes.relative_to("/usr") / "cc1plus", "echo 1")
    return str(home / "bin" / "g++")


def test_a_host_compiler_is_its_driver_and_its_passes_wherever_they_lie(
    tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (gcc(tmp_path / name) for name in ("one", "two"))
    before = tools([one], local)
    assert before["g++/cc1plus"].path.startswith(str(tmp_path / "one"))
    assert tools([two], local) == before
    script(Path(tools([two], local)["g++/cc1plus"].path), "echo 2")
    assert [label for label, tool in tools([two], local).items() if before[label] != tool] == ["g++/cc1plus"]
    script(tmp_path / "mine" / "cc1plus", "echo 3")
    monkeypatch.setenv("COMPILER_PATH", str(tmp_path / "mine"))
    assert tools([one], local)["g++/cc1plus"].path == f"{tmp_path}/mine/cc1plus"


def test_a_clang_of_another_version_is_another_although_its_driver_is_the_same(
    tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is of a library that the driver loads; the text around it holds the place."""
    source = tmp_path / "clang.c"
    source.write_text(
        "#include <stdio.h>\n#include <string.h>\n"
        "int main(int n, char **v) { char t[4096]; strcpy(t, v[0]); strcpy(strrchr(t, '/'), \"/version\");"
        ' FILE *f = fopen(t, "r"); fgets(t, 99, f);'
        ' fprintf(stderr, "clang version %s (here)\\nInstalledDir: %s\\n", t, v[0]); return 0; }'
    )
    built = tmp_path / "built"
    subprocess.run(["/usr/bin/gcc", "-w", "-o", built, source], check=True, env={"PATH": "/usr/bin:/bin"})
    found = []
    for name, version in {"one": "14.0.6", "two": "14.0.6", "three": "14.0.7"}.items():
        (tmp_path / name).mkdir()
        shutil.copy(built, tmp_path / name / "clang-14")
        (tmp_path / name / "version").write_text(version)
        found.append(tools([str(tmp_path / name / "clang-14")], local))
    assert found[0] == found[1] != found[2]


def test_scripts_that_name_each_other_end(tmp_path: Path, local: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    script(one, f"exec {two} {tmp_path}/missing {one}")
    script(two, f"exec {one} /dev/null /")
    assert list(tools([str(one)], local)) == ["one", "one/two"]


# A process that asks for a tool. Each hash is logged and then waits for the gate; so does, before it waits, each lock.
_PROCESS = """
import os, sys, time
from pathlib import Path
import filelock
from kcoord.keys.tools import machine_cache, toolchain
root = Path(sys.argv[1])
machine_cache._RACY, machine_cache._patience[0] = -1, float(sys.argv[2])
def say(what):
    with open(root / what, "a") as log:
        log.write(f"{os.getpid()}\\n")
acquire = filelock.FileLock.acquire
def locking(self, *args, **kwargs):
    say("locks")
    return acquire(self, *args, **kwargs)
filelock.FileLock.acquire = locking
original = toolchain.hash_file
def hashing(path):
    say("hashes")
    deadline = time.monotonic() + 60
    while not (root / "gate").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    return original(path)
toolchain.hash_file = hashing
print(toolchain.fingerprint(root / "ptxas", root / "local").sha256)
"""


def _process(root: Path, wait: float = 60) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROCESS, str(root), str(wait)],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _told(process: subprocess.Popen[str]) -> str:
    done = finish(process, 60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_of_four_processes_one_hashes_and_the_others_wait_for_it(tmp_path: Path) -> None:
    path = script(tmp_path / "ptxas")
    processes = [_process(tmp_path) for _ in range(4)]
    eventually(lambda: len(_lines(tmp_path / "locks")) == 4 and _lines(tmp_path / "hashes"), 60)
    (tmp_path / "gate").touch()
    assert {_told(p) for p in processes} == {machine_cache.hash_file(path)[0]}
    assert len(_lines(tmp_path / "hashes")) == 1


def test_waiting_for_a_process_that_hangs_is_bounded(tmp_path: Path) -> None:
    path = script(tmp_path / "ptxas")
    stuck = _process(tmp_path)
    eventually(lambda: _lines(tmp_path / "hashes"), 60)
    impatient = _process(tmp_path, wait=0.1)
    eventually(lambda: len(_lines(tmp_path / "hashes")) == 2, 60, "it does the work itself")
    (tmp_path / "gate").touch()
    assert _told(impatient) == _told(stuck) == machine_cache.hash_file(path)[0]


@pytest.mark.usefixtures("old_files")
def test_sixteen_threads_see_one_tool_and_each_change_of_it(tmp_path: Path, local: Path, hashes: Hashes) -> None:
    path = script(tmp_path / "ptxas", "echo 0")
    found: list[set[str]] = []
    for round_ in range(3):
        seen: set[str] = set()
        start = threading.Barrier(16)

        def look(start: threading.Barrier = start, seen: set[str] = seen) -> None:
            start.wait(timeout=30)
            for _ in range(50):
                seen.add(sha256(path, local))

        threads = [threading.Thread(target=look) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found.append(seen)
        script(path.with_name("next"), f"echo {round_ + 1}").replace(path)
    assert [len(seen) for seen in found] == [1, 1, 1]
    assert len(set().union(*found)) == 3
    assert len(hashes.paths) == 3, "and in one thread alone"


@pytest.mark.parametrize("name", ["TMPDIR", "RANK", "SLURM_PROCID", "LANG", "HOME"])
def test_a_variable_that_differs_between_equal_ranks_is_no_part_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tool = _script(tmp_path / "mycc", f'echo "${{{name}:-x}}"')
    found = []
    for value in ("/one", "/other"):
        monkeypatch.setenv(name, value)
        found.append(tool_factors(tools([tool], tmp_path / "local")))
    assert found[0] == found[1]


def test_a_variable_that_the_author_ignores_is_no_part_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = _script(tmp_path / "mycc", "echo $MY_SESSION")
    monkeypatch.setenv("MY_SESSION", "1")
    assert "mycc/$MY_SESSION" in tools([tool], tmp_path / "local")
    assert list(tools([tool], tmp_path / "local", {"MY_SESSION"})) == ["mycc"]


def test_a_compiler_that_fails_to_answer_once_is_asked_again_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = "/usr/bin/g++"
    complete = sorted(tools([compiler], tmp_path / "other"))
    assert "g++/cc1plus" in complete
    for answers in (False, True):
        toolchain._walks.clear()
        toolchain._known.clear()
        toolchain._asked.cache_clear()
        with monkeypatch.context() as context:
            if not answers:
                context.setattr(toolchain.subprocess, "run", _refuses)
            found = sorted(tools([compiler], tmp_path / "local"))
        assert (found == complete) is answers


def _refuses(*given: object, **more: object) -> None:
    raise BlockingIOError("no more processes")


def test_a_large_file_beside_a_script_counts_only_if_it_is_named(tmp_path: Path) -> None:
    tool = _script(tmp_path / "bin" / "mycc", 'cat "$(dirname "$0")"/named')
    for name in ("named", "model", "small"):
        (tmp_path / "bin" / name).write_bytes(b"x" * (2 << 20 if name != "small" else 1))
    assert set(tools([tool], tmp_path / "local")) == {"mycc", "mycc/named", "mycc/small"}


def test_files_of_the_kernel_are_no_tools(tmp_path: Path) -> None:
    tool = _script(tmp_path / "mycc", "for d in /proc /sys; do cat $d/kmsg /proc/uptime; done")
    assert set(tools([tool], tmp_path / "local")) == {"mycc"}


def test_a_long_chain_of_scripts_ends(tmp_path: Path) -> None:
    for number in range(1100):
        first = _script(tmp_path / "bin" / f"s{1099 - number}", f"exec {tmp_path}/bin/s{1100 - number}")
    assert len(tools([first], tmp_path / "local")) == 1100


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
