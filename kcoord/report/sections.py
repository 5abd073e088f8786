"""The sections of a job's report below its time line, each HTML with a table; a section without content is empty."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from html import escape

from kcoord.report.comparison import Comparison
from kcoord.report.divergence import Divergence
from kcoord.report.findings import Findings, Kernel, places, why_again
from kcoord.report.misses import Miss
from kcoord.report.tables import nodes_text, ranks_text, seconds, several, table
from kcoord.report.timeline import Timeline
from kcoord.telemetry.spans import plain_text

_MOST_ROWS = 200  # of a table
_SLOWEST = 20  # kernels that are shown unfolded
_FEW = 6  # names that are shown unfolded
_LONGEST_VALUE = 300  # characters of a factor
_MOST_DIVERGENCES = 50
_MOST_FACTORS = 6


def sections(
    timeline: Timeline,
    found: Findings,
    misses: Sequence[Miss],
    divergences: Sequence[Divergence],
    comparison: Comparison | None,
) -> str:
    keys = {id(kernel): n for n, kernel in enumerate(found.kernels)}  # as the time line numbers them
    return "".join((
        _comparison(comparison, keys) if comparison is not None else "",
        _divergences(divergences, keys),
        _slowest(found, keys),
        _misses(misses, keys),
        _duplicates(found, keys),
        _failures(found, keys),
        _events(timeline),
    ))  # fmt: skip


def _slowest(found: Findings, keys: dict[int, int]) -> str:
    compiled = found.compiled
    if not compiled:
        return ""
    heads = (
        "kernel", "backend", "#compile time", "compiled by", "#ranks waited", "#longest wait", "#loads", "#saved", "key",
    )  # fmt: skip
    rows = [
        (
            _button(kernel, keys), escape(kernel.backend), seconds(kernel.seconds), escape(places(kernel.compiles)),
            f"{len(kernel.waiters):,}" if kernel.waiters else "0", seconds(kernel.longest_wait) if kernel.waiters else "",
            f"{kernel.loads:,}", seconds(kernel.saved) if kernel.loads else "", _digest(kernel),
        )
        for kernel in compiled[:_MOST_ROWS]
    ]  # fmt: skip
    shown = table(heads, rows[:_SLOWEST])
    if len(rows) > _SLOWEST:
        left = len(compiled) - len(rows)
        more = _quiet(f"and {left:,} more that took less") if left else ""
        shown += f"<details><summary>The next {len(rows) - _SLOWEST}</summary>{table(heads, rows[_SLOWEST:])}{more}</details>"
    return f"<section><h2>Slowest kernels</h2>{shown}</section>"


def _misses(misses: Sequence[Miss], keys: dict[int, int]) -> str:
    if not misses:
        return ""
    about = (
        "Each kernel is compared with the most similar one of its name that was compiled earlier and is still in the store or on "
        "this node. A factor is anything that the compiled code depends on; if one differs, the kernel has to be compiled again."
    )
    return f"<section><h2>Why they were compiled</h2>{_quiet(about)}{_reasons(misses, keys)}</section>"


def _reasons(misses: Sequence[Miss], keys: dict[int, int]) -> str:
    parts = []
    for miss in misses[:_MOST_ROWS]:
        took = f", {seconds(miss.seconds)}" if miss.seconds else ""
        parts.append(f"<h3>{several(len(miss.kernels), 'kernel')}{took}: {escape(miss.reason)}</h3>")
        if miss.differences:
            texts = [[plain_text(text, _LONGEST_VALUE) for text in difference] for difference in miss.differences]
            rows = [[f"<code>{escape(text)}</code>" for text in difference] for difference in texts[:_MOST_ROWS]]
            parts.append(table(("factor", "before", "now"), rows))
        parts.append(_names(miss.kernels, keys))
    return "".join(parts)


def _comparison(comparison: Comparison, keys: dict[int, int]) -> str:
    changes = [(escape(change.label), *change.texts) for change in comparison.changes]
    parts = [table(("", "#earlier", "#this run", "#difference"), changes)]
    if comparison.slower:
        rows = [
            (
                _button(each.kernel, keys), seconds(each.before.one_compile), seconds(each.kernel.one_compile),
                f"+{seconds(each.seconds)}", _digest(each.kernel),
                "<br>".join(_texts(difference) for difference in each.differences[:_MOST_FACTORS]) or "the same key",
            )
            for each in comparison.slower[:_MOST_ROWS]
        ]  # fmt: skip
        heads = ("kernel", "#earlier", "#this run", "#difference", "key", "factor, before, now")
        parts.append(f"<h3>Slower to compile: {several(len(comparison.slower), 'kernel')}</h3>{table(heads, rows)}")
    if comparison.new:
        count = sum(len(miss.kernels) for miss in comparison.new)
        parts.append(f"<h3>New in this run: {several(count, 'key')}</h3>{_reasons(comparison.new, keys)}")
    if comparison.gone:
        parts.append(f"<h3>Only in the earlier run: {several(len(comparison.gone), 'key')}</h3>")
        parts.append(_names(comparison.gone, {}))
    return f"<section><h2>Compared with job {escape(plain_text(comparison.job))}</h2>{''.join(parts)}</section>"


def _divergences(divergences: Sequence[Divergence], keys: dict[int, int]) -> str:
    parts = []
    for each in divergences[:_MOST_DIVERGENCES]:
        kernels = several(len(each.kernels), "kernel")
        more = "for different GPUs, as expected" if each.expected else f"{seconds(each.seconds)} more of compiling"
        parts.append(f"<h3>{kernels}, {more}: {_texts(each.factors[:_MOST_FACTORS])}</h3>")
        rows = [
            [escape(ranks_text(g.ranks)), escape(nodes_text(g.nodes)), _texts(g.values[:_MOST_FACTORS])]
            for g in each.groups[:_MOST_ROWS]
        ]
        parts.append(table(("ranks", "nodes", "value" if len(each.factors) == 1 else "values, in this order"), rows))
        parts += [_quiet(escape(note)) for note in _notes_on(each)]
        parts.append(_names(each.kernels, keys))
    if not parts:
        return ""
    left = len(divergences) - _MOST_DIVERGENCES
    more = _quiet(f"and {left:,} more") if left > 0 else ""
    about = (
        "These ranks asked for the same kernels and share none of them: a factor of their keys has another value in each of the "
        "lines, so the ranks of each line compiled for themselves. No line waited for another."
    )
    return f"<section><h2>Ranks whose keys differ</h2>{_quiet(about)}{''.join(parts)}{more}</section>"


def _texts(texts: Sequence[str]) -> str:
    return ", ".join(f"<code>{escape(plain_text(text, _LONGEST_VALUE))}</code>" for text in texts)


def _notes_on(divergence: Divergence) -> list[str]:
    notes = []
    left = len(divergence.factors) - _MOST_FACTORS
    if left > 0:
        first, second = (group.kernels[0].key[:12] for group in divergence.groups[:2])
        notes.append(f"{several(left, 'more factor differs', 'more factors differ')}: kcoord explain {first} {second}")
    if divergence.varies:
        notes.append("These are the values of the first kernel; each has its own.")
    left = divergence.left_out + max(0, len(divergence.groups) - _MOST_ROWS)
    if left:
        notes.append(f"{several(left, 'more group of ranks differs', 'more groups of ranks differ')}.")
    return [*notes, f"Remedy: {divergence.remedy}."] if divergence.remedy else notes


def _duplicates(found: Findings, keys: dict[int, int]) -> str:
    duplicates = found.duplicates
    if not duplicates:
        return ""
    rows = [
        (
            _button(k, keys), f"{len(k.compiles)}", seconds(k.more_than_once), escape(places(k.compiles)),
            "<br>".join(escape(reason) for reason in why_again(k)),
        )
        for k in duplicates[:_MOST_ROWS]
    ]  # fmt: skip
    spare = sum(k.more_than_once for k in duplicates)
    about = f"{several(len(duplicates), 'kernel')}, {seconds(spare)} more of compiling than once each."
    shown = table(("kernel", "#times", "#seconds more", "compiled by", "why"), rows)
    return f"<section><h2>Compiled more than once</h2>{_quiet(about)}{shown}</section>"


def _failures(found: Findings, keys: dict[int, int]) -> str:
    rows = []
    for kernel in found.failures[:_MOST_ROWS]:
        for event, placed in (
            ("the compiler raised an exception", kernel.failures),
            ("the process ended while it compiled", kernel.lost),
        ):
            if placed:
                total = sum(span.seconds for _, span in placed)
                rows.append((_button(kernel, keys), event, f"{len(placed)}", seconds(total), escape(places(placed))))
    if not rows:
        return ""
    shown = table(("kernel", "event", "#times", "#seconds", "where"), rows)
    return f"<section><h2>Failed or lost</h2>{shown}</section>"


def _events(timeline: Timeline) -> str:
    """Empty if each node's one agent began and ended, and nothing else happened."""
    events = timeline.events
    begun = Counter(each.node for each in events if each.moment == "begins")
    if max(begun.values(), default=0) < 2 and not any(each.moment == "told" for each in events):
        return ""
    rows = [
        (time.strftime("%H:%M:%S", time.gmtime(each.when)), escape(each.node), escape(each.text))
        for each in events[:_MOST_ROWS]
    ]
    more = _quiet(f"and {len(events) - _MOST_ROWS:,} more") if len(events) > _MOST_ROWS else ""
    about = "Each node's agent, by its own clock (UTC); a line is logged once, however often it happens."
    return f"<section><h2>The agents</h2>{_quiet(about)}{table(('when', 'node', 'event'), rows)}{more}</section>"


def _quiet(html: str) -> str:
    return f'<p class="quiet">{html}</p>'


def _names(kernels: Sequence[Kernel], keys: dict[int, int]) -> str:
    names = ", ".join(f"{_button(k, keys)} {_digest(k)}" for k in kernels[:_MOST_ROWS])
    many = len(kernels) > _FEW
    return f"<details><summary>their names</summary><p>{names}</p></details>" if many else f"<p>{names}</p>"


def _button(kernel: Kernel, keys: dict[int, int]) -> str:
    """The kernel's name; on the time line, if it is there, a click shows it alone."""
    if id(kernel) not in keys:
        return f'<span class="name">{escape(kernel.name)}</span>'
    title = "Show this kernel alone in the time line"
    return f'<button class="kernel name" data-key="{keys[id(kernel)]}" title="{title}">{escape(kernel.name)}</button>'


def _digest(kernel: Kernel) -> str:
    variant = f" {escape(kernel.variant)}" if kernel.variant else ""
    return f'<code class="key">{escape(kernel.key[:12])}</code>{variant}'
