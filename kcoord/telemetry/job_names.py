"""A job's name as the name of a directory, whatever the job is called."""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.parse import quote, unquote

_LONGEST = 200


def directory_name(job: str) -> str:
    """`job` as the name of a directory: never hidden, never ``..``, never too long."""
    name = quote(job, safe="", errors="surrogatepass")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > _LONGEST or not name:
        name = f"{name[: _LONGEST - 20]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return name


def job_of(directory: Path) -> str:
    """The job whose directory this is; of a long name, what the directory's holds of it."""
    return unquote(directory.name, errors="replace")
