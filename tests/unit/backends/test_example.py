"""The example of docs/backends.md, a whole backend outside kcoord: it is found by its entry point, and conforms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from kcoord.testing.backends import BackendSuite

ROOT = Path(__file__).parents[3]
MINI = ROOT / "examples" / "mini"


class TestMini(BackendSuite):
    program = MINI / "subject.py"
    error = "CompileError"
    targets = ({"ARCH": "sm_80"}, {"ARCH": "sm_90"})
    changes = ("flags", "architecture")

    def environment(self, root: Path) -> Mapping[str, str]:
        """As ``pip install`` would leave it: what pyproject.toml says of the package is its metadata."""
        (section,) = re.findall(
            r"\[project\.entry-points\.\"(.+)\"\]\n(\w+) = \"(.+)\"\n", (MINI / "pyproject.toml").read_text()
        )
        metadata = root / "site" / "kcoord_mini-0.1.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kcoord-mini\nVersion: 0.1\n")
        (metadata / "entry_points.txt").write_text("[{}]\n{} = {}\n".format(*section))
        return {"PYTHONPATH": f"{root / 'site'}:{MINI}"}


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (ROOT / "docs" / "backends.md").read_text()
    for name in ("kcoord_mini_compiler.py", "kcoord_mini.py"):
        assert (MINI / name).read_text().strip() in page
