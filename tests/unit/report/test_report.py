"""``kcoord report``: a job on one page, looked at in a real browser."""

from __future__ import annotations

import base64
import json
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kcoord.cli.report import line_of
from kcoord.report.differences import Divergence, Group
from kcoord.report.findings import findings_of, why_again
from kcoord.report.page import drawing, page
from kcoord.report.timeline import Row, Timeline
from kcoord.telemetry.spans import Process, Span
from tests.support.browser import Browser
from tests.support.command import kcoord as run
from tests.support.pages import HOSTILE, Text, make
from tests.support.sandbox import Sandbox


@pytest.fixture
def browser() -> Browser:
    return Browser()


def span(kind: str, key: int, begin: float, seconds: float, outcome: str = "ok", name: str = "", **more: Any) -> Span:
    return Span(kind, outcome, "triton", name or f"kernel_{key}", f"{key:016x}", 1.7e9 + begin, seconds, **more)


def rows(spans: dict[tuple[str, int], list[Span]]) -> Timeline:
    return Timeline("j", [Row(Process(node, 100 + rank, rank), found) for (node, rank), found in spans.items()])


def small() -> Timeline:
    """Two nodes of two ranks: compiled by one, waited for by the others; one failure."""
    found: dict[tuple[str, int], list[Span]] = {("a", 0): [], ("a", 1): [], ("b", 2): [], ("b", 3): []}
    for key in range(4):
        at = key * 2.0
        for rank, place in enumerate(found):
            if rank == key:
                found[place].append(span("compile", key, at, 1.8))
            else:
                found[place] += [span("wait", key, at + 0.01, 1.82), span("load", key, at + 1.83, 0.002, saved=1.8)]
    found["b", 3].append(span("compile", 9, 9.0, 1.0, "failed"))
    found["a", 0].append(span("fetch", 8, 9.0, 0.5))
    return rows(found)


def report(timeline: Timeline, directory: Path) -> Path:
    path = directory / "report.html"
    path.write_text(page(timeline, findings_of(timeline)), encoding="utf-8")
    return path


# What it says


def test_the_slowest_kernel_comes_first_with_who_waited_and_how_long() -> None:
    found = findings_of(small())
    assert [k.name for k in found.compiled] == ["kernel_0", "kernel_1", "kernel_2", "kernel_3"]
    first = found.compiled[0]
    assert (len(first.waiters), first.loads, first.saved) == (3, 3, pytest.approx(5.4))
    assert first.longest_wait == pytest.approx(1.82)
    assert small().figures["saved_seconds"] == pytest.approx(12 * 1.8)
    text = Text(page(small(), found)).text
    assert "4 kernels compiled, each once" in text
    assert "of compiling saved 21.6 s" in text
    assert "the compiler raised an exception" in text


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ({"outcome": "alone", "note": "no agent: refused"}, "nobody coordinated it: no agent: refused"),
        ({"outcome": "private"}, "it was not shared: overridden code"),
        (
            {"outcome": "private", "note": "an input was written meanwhile"},
            "not shared: an input was written meanwhile",
        ),
        ({"note": "it had failed on a (rank 0, pid 1)"}, "it had failed on a"),
        ({"begin": 0.5}, "KCOORD_LEASE_LIMIT"),
        ({}, "the published artifact was gone"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_kernel_that_was_compiled_twice_says_why(second: dict[str, Any], why: str) -> None:
    again = {"kind": "compile", "key": 1, "begin": 5.0, "seconds": 1.0, **second}
    timeline = rows({("a", 0): [span("compile", 1, 0, 1)], ("b", 1): [span(**again)]})
    (kernel,) = findings_of(timeline).duplicates
    assert why in " ".join(why_again(kernel))
    assert why in Text(page(timeline, findings_of(timeline))).text


def test_a_leader_that_was_lost_explains_the_second_compile_and_is_told() -> None:
    lead = span("wait", 1, 0.1, 1.9, "lead")
    timeline = rows({("a", 0): [span("compile", 1, 0, 2, "lost")], ("a", 1): [lead, span("compile", 1, 2, 1)]})
    found = findings_of(timeline)
    assert not found.duplicates, "it was made once"
    assert not found.compiled[0].waiters, "who leads did not wait for this kernel"
    assert [k.name for k in found.failures] == ["kernel_1"]
    assert "the process ended while it compiled" in Text(page(timeline, found)).text


def test_what_is_no_kernel_of_the_job_is_drawn_and_not_counted() -> None:
    timeline = rows({("a", 0): [span("compile", 1, 0, 1), span("compile", 2, 1, 1, aside=True)]})
    assert (timeline.figures["compiles"], timeline.figures["compile_seconds"]) == (1, 1.0)
    assert len(drawing(timeline, findings_of(timeline))[0]["keys"]) == 2


def test_missing_spans_and_files_that_could_not_be_read_are_told() -> None:
    timeline = small()
    timeline.dropped, timeline.problems = 7, ["/x/<b>: torn"]
    text = page(timeline, findings_of(timeline))
    assert "7 spans missing" in text
    assert "/x/&lt;b&gt;: torn" in text


def hostile() -> Timeline:
    found = [span("compile", n, n, 1.0, name=name, note=name) for n, name in enumerate(HOSTILE)]
    found += [span("compile", n, n + 8.0, 1.0, "failed", name=name) for n, name in enumerate(HOSTILE)]
    return Timeline(HOSTILE[0], [Row(Process(HOSTILE[1], 1, 0), found)], problems=[HOSTILE[1]])


def test_names_are_text_wherever_they_stand() -> None:
    found = findings_of(hostile())
    name, other = HOSTILE[:2]
    groups = {(value,): Group({n}, [value]) for n, value in enumerate(HOSTILE)}
    html = page(hostile(), found, [Divergence(("env", other), groups, {k.key: k for k in found.compiled})])
    lines = [line_of(Divergence(("env a\x1b",), {("b\x1b",): Group({1}, ["n"])}))]
    assert all(line.isprintable() for line in lines)
    seen = Text(html)
    assert seen.tags.count("script") == 2
    assert "img" not in seen.tags
    for name in HOSTILE[:2]:
        assert name in seen.text.replace("\u2028", " ")
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.S)[1])  # type: ignore[index]
    assert [k["name"] for k in data["keys"]] == HOSTILE


def test_the_page_needs_nothing_but_itself() -> None:
    html = page(small(), findings_of(small()))
    assert not re.search(r"""(src|href)=|url\(|@import|https?://""", html)
    assert "default-src 'none'" in html


def test_texts_that_are_no_unicode_are_written_all_the_same(tmp_path: Path) -> None:
    timeline = small()
    timeline.job, timeline.problems = "j\udcff", ["/x/\udcff\n: torn"]
    found = findings_of(timeline)
    strange = Divergence(("env X\udcff",), {("\udcff" * 9999,): Group({1}, ["\x1b"])}, {"ab": found.compiled[0]})
    html = page(timeline, found, [strange])
    html.encode()
    assert html.count("\N{REPLACEMENT CHARACTER}") < 1000


def unpacked(data: dict[str, Any]) -> tuple[array[float], array[float]]:
    """The begins and lengths that the script draws, in seconds."""
    begin, length = array("d"), array("f")
    begin.frombytes(base64.b64decode(data["begin"]))
    length.frombytes(base64.b64decode(data["length"]))
    return begin, length


def test_a_clock_that_is_decades_off_makes_no_other_row_coarse() -> None:
    timeline = rows({("a", 0): [span("compile", 1, -1.7e9, 1)], ("b", 1): [span("load", 2, 0.25, 0.0001)]})
    begin, length = unpacked(drawing(timeline, findings_of(timeline))[0])
    assert begin[1] - 1.7e9 == pytest.approx(0.25, abs=1e-6)
    assert length[1] == pytest.approx(0.0001)


def test_of_too_many_spans_the_shortest_are_not_drawn_and_all_compiles_are() -> None:
    spans = [span("load", n, n, 0.001 * (n + 1)) for n in range(6)] + [span("wait", n, n, 1.0 + n) for n in range(6)]
    timeline = rows({("a", 0): [*spans, span("compile", 0, 50, 0.0001)]})
    for most in (13, 10, 7, 4, 2):
        data, left_out = drawing(timeline, findings_of(timeline), most)
        begin, length = unpacked(data)
        assert len(begin) == len(length) == most == 13 - left_out
        assert max(begin) == 50, "the compile is there"


def test_explain_prints_a_strangers_texts_as_they_are_and_whole(sandbox: Sandbox) -> None:
    make(sandbox, "j", "[/b]", **{"[/red]": "x" * 190, "esc": "\x1b[31m"})
    done = run(sandbox, "explain", "[/b]")
    assert "[/red]: " + "x" * 190 in done.stdout.replace("'", "")
    assert "\x1b" not in done.stdout


# In a browser


def painted(dom: str) -> int:
    return int(re.search(r'data-painted="(\d+)"', dom)[1])  # type: ignore[index]


@pytest.fixture
def acting(browser: Browser, tmp_path: Path) -> Callable[[Timeline, str], str]:
    def act(timeline: Timeline, script: str) -> str:
        """The DOM after `script` ran in the page. The page's own policy would not let it: it is taken out."""
        path = report(timeline, tmp_path)
        html = re.sub(r"<meta http-equiv[^>]*>", "", path.read_text(encoding="utf-8"), count=1)
        path.write_text(html.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
        return browser.dom(path)

    return act


POINT = """
const line = document.getElementById("line"), place = line.getBoundingClientRect();
const at = (kind, x, y, more) => (kind === "mouseup" ? window : line).dispatchEvent(new MouseEvent(kind,
  { clientX: place.left + place.width * x, clientY: place.top + y, bubbles: true, button: 0, ...more }));
"""


def test_every_span_is_drawn_and_each_kind_in_its_own_colour(acting: Callable[[Timeline, str], str]) -> None:
    script = """
        const canvas = document.getElementById("line"), seen = new Set();
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        for (let i = 0; i < pixels.length; i += 4) {
          seen.add("#" + [0, 1, 2].map(n => pixels[i + n].toString(16).padStart(2, "0")).join(""));
        }
        const style = getComputedStyle(document.documentElement);
        document.body.dataset.drawn = ["compile", "wait", "fetch", "load", "failed"].filter(
          kind => seen.has(style.getPropertyValue("--" + kind).trim()));
    """
    dom = acting(small(), script)
    assert painted(dom) == sum(1 for _ in small().spans()) == 30
    assert 'data-drawn="compile,wait,fetch,load,failed"' in dom


def test_a_part_of_the_time_line_has_an_address(browser: Browser, tmp_path: Path) -> None:
    path = report(small(), tmp_path)
    assert painted(browser.dom(path, "t=0-1.5&rows=0-1")) == 1, "rank 0 compiles then"
    assert painted(browser.dom(path, "t=nonsense&rows=9-1&key=%&only=%")) == 30


def test_pointing_at_a_span_tells_what_it_is(acting: Callable[[Timeline, str], str]) -> None:
    tip = Text(
        acting(small(), POINT + 'at("mousemove", 0.15, 37);').partition('id="tip"')[2].partition("<figcaption")[0]
    ).text
    assert "kernel_0" in tip
    assert "compiled in 1.80 s" in tip
    assert "a, rank 0, pid 100" in tip


def test_names_in_a_tip_are_text(acting: Callable[[Timeline, str], str]) -> None:
    dom = acting(hostile(), POINT + 'for (let x = 0.02; x < 1; x += 0.01) at("mousemove", x, 37);')
    assert "<title>kcoord: job &lt;/script&gt;" in dom
    assert "<img" not in dom


def test_dragging_a_choice_and_the_keys_change_what_is_shown(acting: Callable[[Timeline, str], str]) -> None:
    drag = 'at("mousedown", 0.4, 30); at("mousemove", 0.5, 30); at("mouseup", 0.5, 30);'
    after = "document.body.dataset.address = location.hash;"
    found = re.search(r'data-address="#t=([\d.]+)-([\d.]+)"', acting(small(), POINT + drag + after))
    assert found
    assert 1 < float(found[1]) < float(found[2]) < 6
    keys = 'line.dispatchEvent(new KeyboardEvent("keydown", { key: "0" }));'
    assert 'data-address=""' in acting(small(), POINT + drag + keys + after)
    chosen = acting(small(), 'document.querySelector("td button.kernel").click();' + after)
    assert f'data-address="#key={0:016x}"' in chosen


def test_a_job_of_512_ranks_and_300_kernels_is_drawn(browser: Browser, tmp_path: Path) -> None:
    ranks = range(512)
    compiles = {rank: [span("compile", rank, rank / 1000, 2.0)] for rank in ranks[:300]}
    loads = [span("load", key, 3 + key / 500, 0.001, saved=2.0) for key in range(300)]
    path = report(rows({(f"node-{rank // 8:03}", rank): compiles.get(rank, []) + loads for rank in ranks}), tmp_path)
    assert path.stat().st_size < 8 << 20
    assert painted(browser.dom(path)) == 300 + 512 * 300


def test_what_a_pool_compiled_is_shown_and_its_workers_are_no_ranks() -> None:
    compiled = [Span("compile", "ok", "triton", name, name * 16, 1.0, 2.0) for name in "ab"]
    loaded = [Span("load", "ok", "triton", "a", "a" * 16, 4.0, 0.1, 2.0)]
    rows = [
        Row(Process("n", 1, 0), loaded),
        *(Row(Process("n", 7 + n, None, pool=True), [s]) for n, s in enumerate(compiled)),
    ]
    timeline = Timeline("j", rows)
    assert timeline.ranks == 1
    assert timeline.title(rows[1].process) == "pool (pid 7)"
    found = findings_of(timeline)
    assert "compiled ahead by the pool" in page(timeline, found)
    assert "2 (1 used)" in page(timeline, found)
