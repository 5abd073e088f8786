"""``kcoord report``: a job on one page, alone or compared with an earlier one."""

from __future__ import annotations

from pathlib import Path

import click

from kcoord.artifacts.catalog import artifacts_of
from kcoord.artifacts.manifest import Manifest
from kcoord.cli.comparison import comparison_facts, comparison_lines
from kcoord.cli.jobs import STDOUT, job_command, output_file
from kcoord.cli.options import print_json
from kcoord.cli.output import echo
from kcoord.errors import KcoordError
from kcoord.report.comparison import Comparison, compare
from kcoord.report.divergence import Divergence, divergences_of
from kcoord.report.findings import Findings, findings_of
from kcoord.report.misses import Miss, misses_of
from kcoord.report.page import page, waiting_share
from kcoord.report.tables import first_few, nodes_text, ranges, ranks_text, seconds, several
from kcoord.report.timeline import Timeline
from kcoord.report.variants import tell_apart
from kcoord.settings import Settings
from kcoord.telemetry.spans import plain_text

_MOST_LINES = 5
_FEW = 3  # factors or groups in a line
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
    timeline = timeline.with_short_names()
    found = findings_of(timeline)
    manifests = _manifests(settings, timeline) if misses else None
    explained = misses_of(manifests, timeline.begin, found) if manifests is not None else []
    divergences = divergences_of(timeline, found, manifests or [])
    tell_apart(found.kernels, manifests or [])
    comparison = _compared(earlier, timeline, found, manifests) if earlier is not None else None
    with output_file(path) as file:
        file.write(page(timeline, found, explained, divergences, comparison))
    if as_json:
        facts = _facts(timeline, found, explained, divergences)
        compared = {} if comparison is None else {"comparison": comparison_facts(comparison)}
        print_json({"file": str(path), **facts, **compared})
        return
    for problem in timeline.problems:
        echo(f"kcoord: not read: {problem}", err=True)
    if path == STDOUT:
        return
    compiles = f"{several(found.compiles, 'compile')}, {seconds(found.saved_seconds)} of compiling saved"
    echo(f"{path}: job {plain_text(timeline.job)}, {compiles}")
    for divergence in divergences[:_MOST_LINES]:
        echo(line_of(divergence))
    if len(divergences) > _MOST_LINES:
        echo(f"and {len(divergences) - _MOST_LINES:,} more such differences: the page has them")
    for line in comparison_lines(comparison) if comparison is not None else ():
        echo(line)


def _compared(earlier: Timeline, timeline: Timeline, found: Findings, manifests: list[Manifest] | None) -> Comparison:
    """Adds what is missing of the earlier job to the problems."""
    job = plain_text(earlier.job)
    timeline.problems += [f"job {job}: {problem}" for problem in earlier.problems]
    if earlier.dropped:
        timeline.problems.append(f"{several(earlier.dropped, 'span')} of job {job}: there were more than are kept")
    if earlier.begin > timeline.begin:
        echo(f"kcoord: job {job} began after job {plain_text(timeline.job)}: name the earlier run first", err=True)
    return compare(earlier, timeline, found, manifests)


def _manifests(settings: Settings, timeline: Timeline) -> list[Manifest] | None:
    """All manifests; None, and a problem, if they cannot be read."""
    try:
        return artifacts_of(settings)
    except (KcoordError, OSError) as error:
        timeline.problems.append(f"artifacts, so that it is not known why kernels were compiled: {error}")
        return None


def _facts(
    timeline: Timeline, found: Findings, explained: list[Miss], divergences: list[Divergence]
) -> dict[str, object]:
    return {
        "job": timeline.job,
        "begin": timeline.begin,
        "seconds": timeline.end - timeline.begin,
        "nodes": timeline.nodes,
        "ranks": timeline.ranks,
        "compiles": found.compiles,
        "compile_seconds": found.compile_seconds,
        "ahead": len(found.ahead),
        "ahead_used": sum(bool(k.loads) for k in found.ahead),
        "loads": found.loads,
        "saved_seconds": found.saved_seconds,
        "wait_seconds": found.wait_seconds,
        "waiting_share": waiting_share(timeline, found),
        "duplicates": [k.name for k in found.duplicates],
        "failures": [k.name for k in found.failures],
        "misses": [
            {
                "reason": m.reason,
                "differences": m.differences,
                "seconds": m.seconds,
                "kernels": [k.name for k in m.kernels],
            }
            for m in explained
        ],
        "divergences": [_divergence_facts(d) for d in divergences],
        "dropped": timeline.dropped,
        "problems": timeline.problems,
        "said": [{"time": e.when, "node": e.node, "text": e.text} for e in timeline.events],
    }


def _divergence_facts(divergence: Divergence) -> dict[str, object]:
    return {
        "expected": divergence.expected,
        "remedy": divergence.remedy,
        "factors": divergence.factors,
        "seconds": divergence.seconds,
        "kernels": [k.name for k in divergence.kernels],
        "values_vary": divergence.varies,
        "groups_left_out": divergence.left_out,
        "groups": [
            {
                "ranks": ",".join(ranges(g.ranks)),
                "nodes": g.nodes,
                "values": g.values,
                "keys": [k.key for k in g.kernels],
            }
            for g in divergence.groups
        ],
    }


def line_of(divergence: Divergence) -> str:
    """``2 kernels have other keys on other ranks: env FLAGS: unset on ranks 0-1 of n0; -G on rank 2 of n1 (remedy)``."""
    kernels = several(len(divergence.kernels), "kernel has", "kernels have")
    factors = first_few([plain_text(factor) for factor in divergence.factors], _FEW)
    groups = [
        f"{', '.join(plain_text(v, _LONGEST_VALUE) for v in group.values[:_FEW])} on {ranks_text(group.ranks)} of "
        f"{nodes_text(group.nodes)}"
        for group in divergence.groups[:_FEW]
    ]
    left = divergence.left_out + max(0, len(divergence.groups) - _FEW)
    groups += [f"other values on {several(left, 'more group', 'more groups')} of ranks"] if left else []
    end = f" ({divergence.remedy})" if divergence.remedy else " (different GPUs: expected)"
    return f"{kernels} other keys on other ranks: {factors}: {'; '.join(groups)}{end}"
