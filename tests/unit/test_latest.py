"""A bounded dictionary keeps the entries that were set last."""

from __future__ import annotations

from kcoord.latest import Latest


def test_the_entry_that_was_set_longest_ago_is_forgotten() -> None:
    latest: Latest[str, int] = Latest(2)
    latest["a"], latest["b"] = 1, 2
    latest["a"] = 3
    latest["c"] = 4
    assert list(latest.items()) == [("a", 3), ("c", 4)]
