"""``kcoord trace``: a job's time line for Perfetto and chrome://tracing."""

from __future__ import annotations

from pathlib import Path

from kcoord.cli.jobs import STDOUT, job_command, output_file
from kcoord.cli.options import print_json
from kcoord.cli.output import echo
from kcoord.report.timeline import Timeline
from kcoord.report.trace import write_chrome
from kcoord.settings import Settings
from kcoord.units import several


@job_command("trace", ".trace.json", ", *.gz is compressed")
def command(timeline: Timeline, path: Path, settings: Settings, as_json: bool) -> None:
    """Write the time line of JOB as a Chrome trace: a row for each rank.

    Open it in https://ui.perfetto.dev or chrome://tracing. Without JOB, list the jobs that have left a time line, newest first.
    """
    for problem in timeline.problems:
        echo(f"kcoord: not read: {problem}", err=True)
    with output_file(path) as file:
        spans = write_chrome(timeline, file.write)
    if as_json:
        facts = {"file": str(path), "job": timeline.job, "nodes": len(timeline.nodes), "ranks": timeline.ranks}
        print_json({**facts, "spans": spans, "dropped": timeline.dropped, "problems": timeline.problems})
    elif path != STDOUT:
        counted = f"{several(spans, 'span')} of {several(timeline.ranks, 'rank')}"
        echo(f"{path}: {counted}; open it in https://ui.perfetto.dev")
