"""What `kcoord doctor` makes of what it finds."""

from __future__ import annotations

import pytest

from kcoord.cli.doctor import _is_vulnerable


@pytest.mark.parametrize(
    ("version", "is_vulnerable"),
    [
        ("6.2.19", True), ("6.2.20", False), ("7.0.15", True), ("8.0.2", True), ("8.2.2", False), ("8.4.0", False),
        ("Valkey 7.2.4", True), ("Valkey 8.1.3", True), ("Valkey 8.1.4", False), ("Valkey 9.0.0", False), ("unknown", False),
    ],
)  # fmt: skip
def test_a_server_without_the_fixes_of_its_branch_is_pointed_out(version: str, is_vulnerable: bool) -> None:
    assert _is_vulnerable(version) is is_vulnerable
