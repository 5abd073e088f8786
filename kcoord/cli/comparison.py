"""The part of ``kcoord report`` about two runs: lines for a terminal, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kcoord.report.comparison import Comparison
from kcoord.report.findings import Kernel
from kcoord.report.misses import Differences
from kcoord.report.tables import first_few, seconds, several
from kcoord.telemetry.spans import plain_text

_MOST_LINES = 10  # slower kernels, and reasons
_FEW = 3  # factors or kernels in a line
_LONGEST_VALUE = 80  # characters


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    yield f"compared with job {plain_text(comparison.job)}:"
    for change in comparison.changes:
        earlier, later, more = change.texts
        yield f"  {change.label}: {earlier} → {later}" + (f" ({more})" if more else "")
    if comparison.slower:
        yield f"slower to compile: {several(len(comparison.slower), 'kernel')}"
    for each in comparison.slower[:_MOST_LINES]:
        why = f" ({_differences_text(each.differences)})" if each.differences else ""
        took = f"{seconds(each.before.one_compile)} → {seconds(each.kernel.one_compile)}"
        yield f"  +{seconds(each.seconds)}: {_name(each.kernel)}: {took}{why}"
    yield from _left(len(comparison.slower))
    if comparison.new:
        yield f"new in this run: {several(sum(len(miss.kernels) for miss in comparison.new), 'key')}"
    for miss in comparison.new[:_MOST_LINES]:
        why = _differences_text(miss.differences) or miss.reason
        yield f"  {several(len(miss.kernels), 'key')}: {why}: {_names(miss.kernels)}"
    yield from _left(len(comparison.new))
    if comparison.gone:
        yield f"only in the earlier run: {several(len(comparison.gone), 'key')}: {_names(comparison.gone)}"


def _left(count: int) -> Iterator[str]:
    if count > _MOST_LINES:
        yield f"  and {count - _MOST_LINES:,} more: the page has them"


def _differences_text(differences: Differences) -> str:
    """``options num_warps: 4 → 8``, as ``kcoord explain`` has it."""
    texts = [[plain_text(text, _LONGEST_VALUE) for text in each] for each in differences]
    return first_few([f"{factor}: {before} → {now}" for factor, before, now in texts], _FEW)


def _name(kernel: Kernel) -> str:
    return f"{kernel.name} {kernel.key[:12]}" + (f" ({kernel.variant})" if kernel.variant else "")


def _names(kernels: Sequence[Kernel]) -> str:
    return first_few([_name(kernel) for kernel in kernels], _FEW)


def comparison_facts(comparison: Comparison) -> dict[str, object]:
    return {
        "job": comparison.job,
        "changes": {c.name: {"earlier": c.earlier, "later": c.later} for c in comparison.changes},
        "slower": [
            {
                **_kernel_facts(each.kernel),
                "compared_to": each.before.key,
                "earlier": each.before.one_compile,
                "later": each.kernel.one_compile,
                "differences": each.differences,
            }
            for each in comparison.slower
        ],
        "new": [
            {
                "reason": miss.reason,
                "differences": miss.differences,
                "seconds": miss.seconds,
                "kernels": [_kernel_facts(kernel) for kernel in miss.kernels],
            }
            for miss in comparison.new
        ],
        "gone": [_kernel_facts(kernel) for kernel in comparison.gone],
    }


def _kernel_facts(kernel: Kernel) -> dict[str, str]:
    return {"name": kernel.name, "key": kernel.key, "variant": kernel.variant}
