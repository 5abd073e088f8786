"""``kcoord report``: a job on one page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import click

from kcoord.artifacts.catalog import artifacts_of
from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.relatives import nearest, telling_differences
from kcoord.cli.jobs import STDOUT, file_name, hours_flag, list_jobs, since, written
from kcoord.cli.options import ON_DISK, json_flag, print_json, settings_flags
from kcoord.errors import KcoordError
from kcoord.settings import Settings
from kcoord.telemetry.findings import Findings, Miss, findings_of, grouped
from kcoord.telemetry.report import page, seconds, waiting_share
from kcoord.telemetry.spans import KEY_DIGITS, plain_text
from kcoord.telemetry.trace import Timeline, load_timeline

_Why = tuple[str, tuple[tuple[str, str, str], ...]]


@click.command("report")
@click.argument("job", required=False)
@click.option("-o", "--output", metavar="FILE", help="Where to write it. Default: kcoord-JOB.html; '-' is stdout.")
@click.option(
    "--misses/--no-misses",
    default=True,
    show_default=True,
    help="Say why kernels were compiled; this reads a small file of every artifact in the store, which may be slow there.",
)
@hours_flag
@json_flag
@settings_flags(*ON_DISK)
def command(
    job: str | None, output: str | None, misses: bool, hours: float | None, as_json: bool, **flags: str | None
) -> None:
    """Write one HTML page about JOB: its time line, the slowest kernels, the seconds saved, and why each kernel was compiled.

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
    explained = explain(settings, timeline, found) if misses else []
    path = Path(output) if output else file_name(job, ".html")
    with written(path) as file:
        file.write(page(timeline, found, explained))
    if as_json:
        print_json({"file": str(path), **_facts(timeline, found, explained)})
        return
    for problem in timeline.problems:
        click.echo(f"kcoord: not read: {problem}", err=True)
    if output == STDOUT:
        return
    what = f"{found.compiles:,} compile{'s' * (found.compiles != 1)}, {seconds(found.saved_seconds)} of compiling saved"
    click.echo(f"{path}: job {plain_text(job)}, {what}")


def explain(settings: Settings, timeline: Timeline, found: Findings) -> list[Miss]:
    """For each kernel that was compiled, why it was not there: how its key differs from the nearest earlier artifact's.

    An artifact that is older than the job is compared to if there is one, else one that the job made itself.
    """
    try:
        manifests = artifacts_of(settings)
    except (KcoordError, OSError) as error:
        timeline.problems.append(f"artifacts, so that it is not known why kernels were compiled: {error}")
        return []
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


def _facts(timeline: Timeline, found: Findings, explained: list[Miss]) -> dict[str, object]:
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
        "dropped": timeline.dropped,
        "problems": timeline.problems,
    }
