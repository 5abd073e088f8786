"""Fixtures of the fault tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import interpose
from tests.support.interpose import Interposer


@pytest.fixture(scope="session")
def interposing_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if interpose.find_compiler() is None:
        pytest.skip("no C compiler: apt install gcc")
    return interpose.build(tmp_path_factory.mktemp("interpose"))


@pytest.fixture
def interposer(interposing_library: Path, tmp_path: Path) -> Interposer:
    return Interposer(interposing_library, tmp_path)
