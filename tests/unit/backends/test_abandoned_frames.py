"""The wrapped entry point of a compiler."""

from __future__ import annotations

import pytest

from kcoord.backends import abandoned_frames


def test_an_error_of_the_compiler_is_its_own() -> None:
    def compile() -> None:
        raise ValueError("no such layout")

    with pytest.raises(ValueError, match="no such layout"):
        abandoned_frames.wrap(compile)()
