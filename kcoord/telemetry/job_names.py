"""Names of directories for jobs of any name."""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.parse import quote, unquote

_LONGEST = 200


def directory_name(job: str) -> str:
    """The name of a job's directory: never hidden, never ``..``, never too long. ``directory_name(job_of(d)) == d.name``."""
    name = _quoted(job)
    if len(name) > _LONGEST or not name:
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        begin = job[:_LONGEST]
        while len(_quoted(begin)) > _LONGEST - 20:  # whole characters: half of one cannot be quoted
            begin = begin[:-1]
        name = f"{_quoted(begin)}-{digest}"
    return name


def job_of(directory: Path) -> str:
    """The job of a directory. A long name is cut, as the directory's is."""
    try:
        return unquote(directory.name, errors="surrogatepass")
    except UnicodeDecodeError:  # a directory that kcoord did not make
        return directory.name


def _quoted(job: str) -> str:
    name = quote(job, safe="", errors="surrogatepass")
    return f"%2E{name[1:]}" if name.startswith(".") else name
