"""A job's name as the name of a directory, whatever the job is called."""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.parse import quote, unquote

_LONGEST = 200


def directory_name(job: str) -> str:
    """`job` as the name of a directory: never hidden, never ``..``, never too long.

    Of the job that `job_of` makes of a directory's name it is that name again.
    """
    name = _quoted(job)
    if len(name) > _LONGEST or not name:
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        begin = job[:_LONGEST]
        while len(_quoted(begin)) > _LONGEST - 20:  # at a character's end: half a character has no name of its own
            begin = begin[:-1]
        name = f"{_quoted(begin)}-{digest}"
    return name


def job_of(directory: Path) -> str:
    """The job whose directory this is; of a long name, what the directory's holds of it."""
    try:
        return unquote(directory.name, errors="surrogatepass")
    except UnicodeDecodeError:  # a directory that kcoord did not make
        return directory.name


def _quoted(job: str) -> str:
    name = quote(job, safe="", errors="surrogatepass")
    return f"%2E{name[1:]}" if name.startswith(".") else name
