"""The sections of a job's report below its time line, each HTML with a table; a section without content is empty."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from html import escape

from kcoord.report.differences import Divergence
from kcoord.report.findings import Findings, Kernel, places, why_again
from kcoord.report.tables import nodes_text, ranks_text, seconds, several, table
from kcoord.report.timeline import Timeline
from kcoord.telemetry.spans import plain_text

_MOST_ROWS = 100  # of a table
_FEW = 6  # names that are shown unfolded
_LONGEST_VALUE = 300  # characters of a factor


def sections(timeline: Timeline, found: Findings, divergences: Sequence[Divergence]) -> str:
    keys = {id(kernel): n for n, kernel in enumerate(found.kernels)}  # as the time line numbers them
    return "".join((
        _section("Ranks whose keys differ", "".join(_divergence(each, keys) for each in divergences[:_MOST_ROWS])),
        _section("Slowest kernels", _slowest(found, keys)),
        _section("Compiled more than once", _duplicates(found, keys)),
        _section("Failed or lost", _failures(found, keys)),
        _section("The agents", _events(timeline)),
    ))  # fmt: skip


def _section(title: str, html: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{html}</section>" if html else ""


def _rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of the first `rows`, with the number of others."""
    left = len(rows) - _MOST_ROWS
    more = f'<p class="quiet">and {left:,} more</p>' if left > 0 else ""
    return table(heads, rows[:_MOST_ROWS]) + more if rows else ""


def _slowest(found: Findings, keys: dict[int, int]) -> str:
    heads = (
        "kernel", "backend", "#compile time", "compiled by", "#ranks waited", "#longest wait", "#loads", "#saved", "key",
    )  # fmt: skip
    rows = [
        (
            _button(kernel, keys), escape(kernel.backend), seconds(kernel.seconds), escape(places(kernel.compiles)),
            f"{len(kernel.waiters):,}", seconds(kernel.longest_wait), f"{kernel.loads:,}", seconds(kernel.saved),
            _digest(kernel),
        )
        for kernel in found.compiled
    ]  # fmt: skip
    return _rows(heads, rows)


def _divergence(divergence: Divergence, keys: dict[int, int]) -> str:
    kernels, factors = several(len(divergence.kernels), "kernel"), ", ".join(map(_code, divergence.factors))
    rows = [
        (escape(ranks_text(sorted(group.ranks))), escape(nodes_text(group.nodes)), ", ".join(map(_code, values)))
        for values, group in divergence.groups.items()
    ]
    head = f"<h3>{kernels}, {seconds(divergence.seconds)} more of compiling: {factors}</h3>"
    remedy = f"<p>Remedy: {escape(divergence.remedy)}.</p>"
    return head + _rows(("ranks", "nodes", "values"), rows) + remedy + _names([*divergence.kernels.values()], keys)


def _duplicates(found: Findings, keys: dict[int, int]) -> str:
    rows = [
        (
            _button(k, keys), f"{len(k.compiles)}", seconds(k.more_than_once), escape(places(k.compiles)),
            "<br>".join(escape(reason) for reason in why_again(k)),
        )
        for k in found.duplicates
    ]  # fmt: skip
    return _rows(("kernel", "#times", "#seconds more", "compiled by", "why"), rows)


def _failures(found: Findings, keys: dict[int, int]) -> str:
    rows = []
    for kernel in found.failures:
        for event, placed in (
            ("the compiler raised an exception", kernel.failures),
            ("the process ended while it compiled", kernel.lost),
        ):
            if placed:
                total = sum(span.seconds for _, span in placed)
                rows.append((_button(kernel, keys), event, f"{len(placed)}", seconds(total), escape(places(placed))))
    return _rows(("kernel", "event", "#times", "#seconds", "where"), rows)


def _events(timeline: Timeline) -> str:
    """Empty if each node's one agent began and ended, and nothing else happened."""
    begun = Counter(each.node for each in timeline.events if each.moment == "begins")
    if max(begun.values(), default=0) < 2 and not any(each.moment == "told" for each in timeline.events):
        return ""
    rows = [
        (time.strftime("%H:%M:%S", time.gmtime(each.when)), escape(each.node), escape(each.text))
        for each in timeline.events
    ]
    return _rows(("when (UTC)", "node", "event"), rows)


def _code(text: str) -> str:
    return f"<code>{escape(plain_text(text, _LONGEST_VALUE))}</code>"


def _names(kernels: Sequence[Kernel], keys: dict[int, int]) -> str:
    names = ", ".join(f"{_button(k, keys)} {_digest(k)}" for k in kernels[:_MOST_ROWS])
    many = len(kernels) > _FEW
    return f"<details><summary>their names</summary><p>{names}</p></details>" if many else f"<p>{names}</p>"


def _button(kernel: Kernel, keys: dict[int, int]) -> str:
    """The kernel's name; a click shows it alone on the time line."""
    title = "Show this kernel alone in the time line"
    return f'<button class="kernel name" data-key="{keys[id(kernel)]}" title="{title}">{escape(kernel.name)}</button>'


def _digest(kernel: Kernel) -> str:
    variant = f" {escape(kernel.variant)}" if kernel.variant else ""
    return f'<code class="key">{escape(kernel.key[:12])}</code>{variant}'
