"""The documentation says what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kcoord.cli import _COMMANDS
from kcoord.settings import FIELDS, Settings, variable

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]
_BY_ENVIRONMENT = ("local_dir",)  # whose default is said in words


def settings_table() -> list[str]:
    """README's table of settings, from the table that parses them."""
    defaults = Settings()
    lines = ["| variable | unit | default | what it is |", "| --- | --- | --- | --- |"]
    for spec in FIELDS:
        default = "" if spec.name in _BY_ENVIRONMENT else _shown(getattr(defaults, spec.name))
        lines.append(f"| `{variable(spec.name)}` | {spec.metadata['unit']} | {default} | {spec.metadata['doc']} |")
    return lines


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, (bool, float)) and value == int(value) else str(value)


def test_readme_lists_every_setting_as_the_code_has_it() -> None:
    assert "\n".join(settings_table()) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`kcoord ([a-z]+)", page.read_text()):
        assert name in _COMMANDS


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_variables_that_are_named_exist(page: Path) -> None:
    known = {variable(f.name) for f in FIELDS} | {"KCOORD_"}
    for name in re.findall(r"\bKCOORD_[A-Z_]*", page.read_text()):
        assert name in known
