"""``kcoord report``: a job on one page."""

from __future__ import annotations

from pathlib import Path

from kcoord.artifacts.catalog import newest_first
from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.many_keys import many_keys
from kcoord.cli.jobs import STDOUT, job_command, output_file, scope_of
from kcoord.cli.options import print_json
from kcoord.cli.output import echo
from kcoord.errors import KcoordError
from kcoord.report.differences import Divergence, distinguishing_factors, divergences_of
from kcoord.report.findings import findings_of, why_again
from kcoord.report.page import page
from kcoord.report.timeline import Timeline
from kcoord.settings import Settings
from kcoord.telemetry.figures import summary
from kcoord.telemetry.spans import KEY_DIGITS, plain_text
from kcoord.units import first_few, several

_MOST_LINES = 10
_FEW = 3  # factors or groups in a line
_LONGEST_VALUE = 80  # characters


@job_command("report", ".html")
def command(timeline: Timeline, path: Path, settings: Settings, as_json: bool) -> None:
    """Write one HTML page about JOB: its time line, the slowest kernels, and the keys that differ by rank.

    Without JOB, list the jobs that have left a time line, newest first.
    """
    found = findings_of(timeline)
    manifests = _manifests(settings, timeline, {kernel.key for kernel in found.kernels})
    divergences = divergences_of(timeline, found, manifests)
    texts = {digest[:KEY_DIGITS]: text for digest, text in distinguishing_factors(manifests).items()}
    for kernel in found.kernels:
        kernel.variant = texts.get(kernel.key, "")
    compiled = {kernel.key for kernel in found.kernels if kernel.compiles}
    many = [str(each) for each in many_keys(m for m in manifests if m.key.digest[:KEY_DIGITS] in compiled)]
    with output_file(path) as file:
        file.write(page(timeline, found, divergences, many))
    if as_json:
        print_json({
            "file": str(path),
            "job": timeline.job,
            "begin": timeline.begin,
            "seconds": timeline.end - timeline.begin,
            "nodes": timeline.nodes,
            "ranks": timeline.ranks,
            **timeline.figures,
            "duplicates": [{"name": k.name, "key": k.key, "why": why_again(k)} for k in found.duplicates],
            "failed": [k.name for k in found.failures],
            "divergences": [_document(divergence) for divergence in divergences],
            "many_keys": many,
            "problems": timeline.problems,
        })  # fmt: skip
        return
    for problem in timeline.problems:
        echo(f"kcoord: not read: {problem}", err=True)
    if path == STDOUT:
        return
    echo(f"{path}: job {plain_text(timeline.job)}, {scope_of(timeline, settings)}: {summary(timeline.figures)}")
    for line in many[:_MOST_LINES]:
        echo(line)
    for divergence in divergences[:_MOST_LINES]:
        echo(line_of(divergence))
    if len(divergences) > _MOST_LINES:
        echo(f"  and {len(divergences) - _MOST_LINES:,} more: the page has them")


def line_of(divergence: Divergence) -> str:
    """``2 kernels have other keys on other ranks: env FLAGS: unset on ranks 0-1 of n0; -G on rank 2 of n1 (remedy)``."""
    kernels = several(len(divergence.kernels), "kernel has", "kernels have")
    factors = first_few([plain_text(factor) for factor in divergence.factors], _FEW)
    groups = [
        f"{', '.join(plain_text(v, _LONGEST_VALUE) for v in values[:_FEW])} on {group.ranks_text} of {group.nodes_text}"
        for values, group in divergence.groups.items()
    ]
    return f"{kernels} other keys on other ranks: {factors}: {first_few(groups, _FEW, '; ')} ({divergence.remedy})"


def _manifests(settings: Settings, timeline: Timeline, keys: set[str]) -> list[Manifest]:
    """The manifests of the job's keys; none, and a problem, if they cannot be read."""
    try:
        return list(newest_first(settings, lambda digest: digest[:KEY_DIGITS] in keys))
    except (KcoordError, OSError) as error:
        timeline.problems.append(f"artifacts, so that the keys of ranks are not compared: {error}")
        return []


def _document(divergence: Divergence) -> dict[str, object]:
    return {
        "remedy": divergence.remedy,
        "factors": divergence.factors,
        "seconds": divergence.seconds,
        "kernels": [k.name for k in divergence.kernels.values()],
        "keys": list(divergence.kernels),
        "groups": [
            {"ranks": ",".join(group.ranges), "nodes": group.nodes, "values": values}
            for values, group in divergence.groups.items()
        ],
    }
