"""Run the tests that failed in the last run once more, with nothing beside them: ``python -m tests.again [pytest's arguments]``.

A test that passes now depends on what runs beside it, and is to be mended; its name is printed. More than `MOST` are not tried.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

MOST = 10
FAILED = Path(".pytest_cache/v/cache/lastfailed")


def failed(text: str) -> list[str]:
    """The tests that pytest's cache names; pytest-xdist has appended each one's group: ``…::test[case]@group``."""
    return [name.rpartition("@")[0] or name for name in json.loads(text)]


def main() -> int:
    """Pytest's exit code; 1 where nothing, or too much, has failed."""
    names = failed(FAILED.read_text()) if FAILED.exists() else []
    print(f"{len(names)} tests failed" + "".join(f"\n  {name}" for name in names[:MOST]), flush=True)
    if not 0 < len(names) <= MOST:
        return 1
    return int(pytest.main([*sys.argv[1:], "-n", "1", *names]))


if __name__ == "__main__":
    sys.exit(main())
