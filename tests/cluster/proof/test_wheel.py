"""The wheel that the agent's image installs: kcoord alone, and its command needs neither torch nor Triton."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.sandbox import finish

ROOT = Path(__file__).resolve().parents[3]
_HEAVY = "torch", "triton", "numpy"
_NO_COMPILERS = f"""
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {_HEAVY}:
            raise AssertionError(f"{{name}} is imported")
sys.meta_path.insert(0, Refused())
from kcoord.cli import main
main()
"""


pytestmark = pytest.mark.xdist_group("wheel")


def test_it_holds_kcoord_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kcoord", "kcoord_launch"}
    assert {"kcoord/report/report.html", "kcoord/report/report.js"} <= set(names), "what the report is made from"


def test_its_command_runs_where_there_is_neither_torch_nor_triton(wheel: Path, tmp_path: Path) -> None:
    """Installed into an empty environment; the few dependencies that it declares come from this one."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(home / "bin" / "python"),
        "install",
        "--no-deps",
        "--no-index",
    ]
    done = subprocess.run([*install, wheel], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (home / "bin" / "kcoord").exists()
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("KCOORD_", "PYTHON"))}
    environ["PYTHONPATH"] = sysconfig.get_paths()["purelib"]  # click, msgpack, …; and torch, which is refused
    for arguments in ((), ("agent",)):
        command = [str(home / "bin" / "python"), "-c", _NO_COMPILERS, *arguments, "--help"]
        process = subprocess.Popen(
            command, env=environ, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        done = finish(process)
        assert done.returncode == 0, done.stderr
        assert "Usage:" in done.stdout
