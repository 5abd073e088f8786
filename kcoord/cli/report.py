"""``kcoord report``: a job on one page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from kcoord.artifacts.catalog import artifacts_of
from kcoord.artifacts.manifest import Manifest
from kcoord.cli.jobs import STDOUT, file_name, hours_flag, list_jobs, since, written
from kcoord.cli.options import ON_DISK, json_flag, print_json, settings_flags
from kcoord.errors import KcoordError
from kcoord.report.divergence import Divergence, divergences_of
from kcoord.report.findings import (
    Findings,
    Miss,
    findings_of,
    grouped,
)
from kcoord.report.page import page, waiting_share
from kcoord.report.relatives import nearest, telling_differences
from kcoord.report.tables import (
    nodes_text,
    ranges,
    ranks_text,
    seconds,
    several,
)
from kcoord.report.trace import Timeline, load_timeline
from kcoord.settings import Settings
from kcoord.telemetry.spans import KEY_DIGITS, plain_text

_MOST_LINES = 5
_FEW = 3  # factors or groups in a line
_LONGEST_VALUE = 80  # characters

_Why = tuple[str, tuple[tuple[str, str, str], ...]]


@click.command("report")
@click.argument("job", required=False)
@click.option("-o", "--output", metavar="FILE", help="Where to write it. Default: kcoord-JOB.html; '-' is stdout.")
@click.option(
    "--misses/--no-misses",
    default=True,
    show_default=True,
    help="Say why kernels were compiled, and in what the keys of ranks differ; this reads a small file of every artifact in the "
    "store, which may be slow there.",
)
@hours_flag
@json_flag
@settings_flags(*ON_DISK)
def command(
    job: str | None, output: str | None, misses: bool, hours: float | None, as_json: bool, **flags: str | None
) -> None:
    """Write one HTML page about JOB: its time line, the slowest kernels, the seconds saved, why each kernel was compiled, and in
    what the keys of ranks differ that did not share them.

    The page needs no network and nothing beside it. Without JOB, list the jobs that have left a time line, newest first.
    """
    settings = Settings.from_environ(**flags)
    if job is None:
        list_jobs(settings, as_json)
        return
    if as_json and output == STDOUT:
        raise click.UsageError("--json and '-o -' both want stdout: give -o a file")
    timeline = load_timeline(settings, job, since(hours)).with_short_names()
    found = findings_of(timeline)
    manifests = _manifests(settings, timeline) if misses else []
    explained = explain(manifests, timeline, found) if manifests is not None and misses else []
    divergences = divergences_of(timeline, found, manifests or [])
    path = Path(output) if output else file_name(job, ".html")
    with written(path) as file:
        file.write(page(timeline, found, explained, divergences))
    if as_json:
        print_json({"file": str(path), **_facts(timeline, found, explained, divergences)})
        return
    for problem in timeline.problems:
        click.echo(f"kcoord: not read: {problem}", err=True)
    if output == STDOUT:
        return
    what = f"{found.compiles:,} compile{'s' * (found.compiles != 1)}, {seconds(found.saved_seconds)} of compiling saved"
    click.echo(f"{path}: job {plain_text(job)}, {what}")
    for divergence in divergences[:_MOST_LINES]:
        click.echo(line_of(divergence))
    if len(divergences) > _MOST_LINES:
        click.echo(f"and {len(divergences) - _MOST_LINES:,} more such differences: the page has them")


def _manifests(settings: Settings, timeline: Timeline) -> list[Manifest] | None:
    """Of all artifacts there are; None, and a problem, if they cannot be read."""
    try:
        return artifacts_of(settings)
    except (KcoordError, OSError) as error:
        timeline.problems.append(f"artifacts, so that it is not known why kernels were compiled: {error}")
        return None


def explain(manifests: Sequence[Manifest], timeline: Timeline, found: Findings) -> list[Miss]:
    """For each kernel that was compiled, why it was not there: how its key differs from the nearest earlier artifact's.

    An artifact that is older than the job is compared to if there is one, else one that the job made itself.
    """
    by_key = {m.key.digest[:KEY_DIGITS]: m for m in manifests}
    relatives: dict[tuple[str, str], list[Manifest]] = defaultdict(list)
    for manifest in manifests:
        relatives[manifest.key.backend, manifest.key.name].append(manifest)
    return grouped((*_why(by_key.get(k.key), relatives, timeline.begin), k) for k in found.compiled)


def _why(mine: Manifest | None, by_name: Mapping[tuple[str, str], list[Manifest]], began: float) -> _Why:
    if mine is None:
        return "what they made is neither in the store nor on this node, so nothing can be said", ()
    if mine.origin.created < began:
        return "compiled before with this very key: it could not be fetched, or was not right for this GPU", ()
    relatives = by_name[mine.key.backend, mine.key.name]  # the manifest's: a span's name may be cut
    older = [m for m in relatives if m.origin.created < began]
    theirs = nearest(older, mine) or nearest(relatives, mine)
    if theirs is None:
        return "never compiled before", ()
    differences = tuple((d.name, d.ours or "unset", d.theirs or "unset") for d in telling_differences(theirs, mine))
    which = "this factor" if len(differences) == 1 else "these factors"
    if older:
        return f"compiled before, with another value of {which}", differences
    return f"new in this job, which has compiled another of the same name that differs in {which}", differences


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
        "said": [{"time": s.when, "node": s.node, "text": s.text} for s in timeline.said],
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
    """One line, for people."""
    what = f"{several(len(divergence.kernels), 'kernel has', 'kernels have')} other keys on other ranks"
    shown = divergence.factors[:_FEW]
    factors = ", ".join(plain_text(factor) for factor in shown)
    factors += f" and {len(divergence.factors) - _FEW} more" if len(divergence.factors) > _FEW else ""
    places = [
        f"{', '.join(plain_text(v, _LONGEST_VALUE) for v in group.values[:_FEW])} on {ranks_text(group.ranks)} of "
        f"{nodes_text(group.nodes)}"
        for group in divergence.groups[:_FEW]
    ]
    left = divergence.left_out + max(0, len(divergence.groups) - _FEW)
    places += [f"other values on {left:,} more group{'s' if left > 1 else ''} of ranks"] if left else []
    end = f" ({divergence.remedy})" if divergence.remedy else " (different GPUs: expected)"
    return f"{what}: {factors}: {'; '.join(places)}{end}"
