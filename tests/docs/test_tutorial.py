"""The tutorial, as a stranger walks it: each command is the page's, and each statement of the page holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.living import agents_of
from tests.support.sandbox import Sandbox

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
    """But for the first, which installs: it is installed here."""
    found = steps()
    assert sorted(found) == list("1234567")
    script = "\n".join(f"echo STEP{number}\n{found[number]}" for number in "234567").replace("rm -r", "ls\nrm -r")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = sandbox.env(
        PATH=path, KCOORD=str(ROOT), TRITON_DEFAULT_FP_FUSION="1", OMP_NUM_THREADS="1", KCOORD_AHEAD="0"
    )
    done = subprocess.run(
        ["bash", "-c", script], env=environment, cwd=sandbox.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # fmt: skip
    said = dict(part.split("\n", 1) for part in done.stdout.split("STEP")[1:])
    assert "kcoord: 16 kernels asked for, 8 compiled" in said["2"]
    assert "16 kernels asked for, 0 compiled" in said["2"]
    assert re.findall(r"asked for, (\d+) compiled", said["3"]) == ["8", "0"], said["3"]
    assert "4 keys: 4 compiled, 0 loaded, 0 skipped" in said["4"], said["4"]
    assert "please report it" not in done.stdout
    assert "matmul" in said["5"]
    assert re.search(r"from \w{12} to \w{12}:\n  .*→", said["5"]), said["5"]
    assert "12 of 12 artifacts stay" in said["6"]
    assert "8 artifacts verified, 4 bad" in said["6"], said["6"]
    assert "report.html" in said["7"], "it was there"
    assert not agents_of(sandbox.processes())
