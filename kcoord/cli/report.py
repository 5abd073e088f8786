"""``kcoord report``: a job on one page, alone or compared with an earlier one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from kcoord.artifacts.catalog import artifacts_of
from kcoord.artifacts.manifest import Manifest
from kcoord.cli.jobs import STDOUT, job_command, output_file, scope_of
from kcoord.cli.options import print_json
from kcoord.cli.output import echo
from kcoord.errors import KcoordError
from kcoord.report.comparison import Comparison, compare
from kcoord.report.differences import Miss, misses_of
from kcoord.report.divergence import Divergence, divergences_of
from kcoord.report.findings import Findings, findings_of, why_again
from kcoord.report.page import page, waiting_share
from kcoord.report.tables import first_few, nodes_text, ranges, ranks_text, several
from kcoord.report.timeline import Timeline
from kcoord.report.variants import variants_of
from kcoord.settings import Settings
from kcoord.telemetry.figures import summary
from kcoord.telemetry.spans import KEY_DIGITS, plain_text

_MOST_LINES = 10
_FEW = 3  # factors, kernels or groups in a line
_LONGEST_VALUE = 80  # characters


@job_command("report", ".html", compares=True)
@click.option(
    "--misses/--no-misses",
    default=True,
    show_default=True,
    help="Explain why kernels were compiled and how the keys of ranks differ; reads the manifest of every artifact.",
)
def command(
    timeline: Timeline, earlier: Timeline | None, path: Path, settings: Settings, misses: bool, as_json: bool
) -> None:
    """Write one HTML page about JOB: its time line, the slowest kernels, why each was compiled, and the keys that differ by rank.

    With OTHER compare two runs, of which JOB is the earlier: the page is about OTHER. Without JOB, list the jobs that have left a
    time line, newest first.
    """
    found = findings_of(timeline)
    manifests = _manifests(settings, timeline) if misses else []
    explained = misses_of(manifests, timeline.begin, found) if misses else []
    divergences = divergences_of(timeline, found, manifests)
    asked = {kernel.key for kernel in found.kernels}
    variants = variants_of(m for m in manifests if m.key.digest[:KEY_DIGITS] in asked)
    texts = {digest[:KEY_DIGITS]: text for digest, text in variants.items()}
    for kernel in found.kernels:
        kernel.variant = texts.get(kernel.key, "")
    comparison = compare(earlier, timeline, found, manifests) if earlier is not None else None
    if earlier is not None:
        timeline.problems += [f"job {plain_text(earlier.job)}: {problem}" for problem in earlier.problems]
    with output_file(path) as file:
        file.write(page(timeline, found, explained, divergences, comparison))
    if as_json:
        print_json({"file": str(path), **_facts(timeline, found, explained, divergences, comparison)})
        return
    for problem in timeline.problems:
        echo(f"kcoord: not read: {problem}", err=True)
    if path == STDOUT:
        return
    echo(f"{path}: job {plain_text(timeline.job)}, {scope_of(timeline, settings)}: {summary(timeline.figures)}")
    _echo([line_of(divergence) for divergence in divergences])
    if comparison is not None:
        echo(f"compared with job {plain_text(comparison.job)}:")
        _echo([f"  {name}: {before} → {now}" for name, before, now in comparison.texts()])
        _echo([f"  {line}" for line in new_lines(comparison.new)])


def _echo(lines: Sequence[str]) -> None:
    for line in lines[:_MOST_LINES]:
        echo(line)
    if len(lines) > _MOST_LINES:
        echo(f"  and {len(lines) - _MOST_LINES:,} more: the page has them")


def new_lines(new: Sequence[Miss]) -> Iterator[str]:
    """``2 new keys: options num_warps: 4 → 8: softmax e5b4d7552c53, gelu 644c838fc8f4``."""
    for miss in new:
        differences = [[plain_text(text, _LONGEST_VALUE) for text in each] for each in miss.differences]
        why = first_few([f"{factor}: {before} → {now}" for factor, before, now in differences], _FEW) or miss.reason
        names = first_few([f"{kernel.name} {kernel.key[:12]}" for kernel in miss.kernels], _FEW)
        yield f"{several(len(miss.kernels), 'new key')}: {why}: {names}"


def line_of(divergence: Divergence) -> str:
    """``2 kernels have other keys on other ranks: env FLAGS: unset on ranks 0-1 of n0; -G on rank 2 of n1 (remedy)``."""
    kernels = several(len(divergence.kernels), "kernel has", "kernels have")
    factors = first_few([plain_text(factor) for factor in divergence.factors], _FEW)
    groups = [
        f"{', '.join(plain_text(v, _LONGEST_VALUE) for v in group.values[:_FEW])} on {ranks_text(sorted(group.ranks))} of "
        f"{nodes_text(group.nodes)}"
        for group in divergence.groups[:_FEW]
    ]
    left = divergence.left_out + max(0, len(divergence.groups) - _FEW)
    groups += [f"other values on {several(left, 'more group', 'more groups')} of ranks"] if left else []
    end = divergence.remedy or "different GPUs: expected"
    return f"{kernels} other keys on other ranks: {factors}: {'; '.join(groups)} ({end})"


def _manifests(settings: Settings, timeline: Timeline) -> list[Manifest]:
    """All manifests; none, and a problem, if they cannot be read."""
    try:
        return artifacts_of(settings)
    except (KcoordError, OSError) as error:
        timeline.problems.append(f"artifacts, so that it is not known why kernels were compiled: {error}")
        return []


def _facts(
    timeline: Timeline,
    found: Findings,
    explained: Sequence[Miss],
    divergences: Sequence[Divergence],
    comparison: Comparison | None,
) -> dict[str, object]:
    facts = {
        "job": timeline.job,
        "begin": timeline.begin,
        "seconds": timeline.end - timeline.begin,
        "nodes": timeline.nodes,
        "ranks": timeline.ranks,
        **timeline.figures,
        "waiting_share": waiting_share(timeline, found),
        "duplicates": [{"name": k.name, "key": k.key, "why": why_again(k)} for k in found.duplicates],
        "failed": [k.name for k in found.failures],
        "misses": [_miss_facts(miss) for miss in explained],
        "divergences": [_divergence_facts(d) for d in divergences],
        "problems": timeline.problems,
        "said": [{"time": e.when, "node": e.node, "text": e.text} for e in timeline.events],
    }
    if comparison is not None:
        new = [_miss_facts(miss) for miss in comparison.new]
        facts["comparison"] = {"job": comparison.job, "sums": comparison.sums, "new": new}
    return facts


def _miss_facts(miss: Miss) -> dict[str, object]:
    facts = {"reason": miss.reason, "differences": miss.differences, "seconds": miss.seconds}
    return {**facts, "kernels": [k.name for k in miss.kernels], "keys": [k.key for k in miss.kernels]}


def _divergence_facts(divergence: Divergence) -> dict[str, object]:
    return {
        "expected": not divergence.remedy,
        "remedy": divergence.remedy,
        "factors": divergence.factors,
        "seconds": divergence.seconds,
        "kernels": [k.name for k in divergence.kernels],
        "groups_left_out": divergence.left_out,
        "groups": [
            {
                "ranks": ",".join(ranges(sorted(g.ranks))),
                "nodes": g.nodes,
                "values": g.values,
                "keys": [k.key for k in g.kernels],
            }
            for g in divergence.groups
        ],
    }
