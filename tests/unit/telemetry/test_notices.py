from __future__ import annotations

import logging

import pytest

from kcoord.telemetry.events import Notices


def test_a_notice_that_quotes_what_is_no_text_can_be_written_to_any_log(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices()
    with caplog.at_level(logging.WARNING):
        assert notices.tell("no agent (b\udcffad)")
    assert notices.since(0) == (["no agent (b\\udcffad)"], 1)
    assert caplog.messages == ["kcoord: no agent (b\\udcffad)"]
    caplog.text.encode()
