"""The value of one setting: each function parses a text, and raises ValueError with the remedy."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

from kcoord.units import parse_span

LONGEST_SOCKET_PATH = 100  # bytes; sockaddr_un holds 108, and a lock file needs a suffix
LONGEST_JOB = 200  # characters of a job's name
TRUST = ("require", "off")
ON = ("1", "true", "yes", "on")
_TEN_YEARS = 10 * 365 * 86400.0


def same_everywhere(value: str) -> None:
    """Raises ValueError for a path that is another one for each process that reads it."""
    if not value.startswith(("/", "~")):
        raise ValueError(
            "write the whole path, from / or ~: a relative one would be another directory for each process"
        )


def path(value: str) -> Path:
    try:
        return Path(value).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # "~nobody/…", or a working directory that was removed
        raise ValueError(f"{error}: write the whole path") from None


def socket(value: str) -> Path:
    place = path(value)
    if len(os.fsencode(place)) > LONGEST_SOCKET_PATH:
        raise ValueError(f"it is longer than {LONGEST_SOCKET_PATH} bytes, the limit of a socket's path: shorten it")
    return place


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan


def seconds(value: str) -> float:
    number = _number(value)
    if not 0 < number < _TEN_YEARS:
        raise ValueError("it must be a positive number of seconds, such as 15 or 0.5")
    return number


def seconds_or_never(value: str) -> float:
    if value.strip() in ("0", "0.0"):
        return 0.0
    try:
        return seconds(value)
    except ValueError as error:
        raise ValueError(f"{error}, or 0") from None


def factor(value: str) -> float:
    number = _number(value)
    if number != 0 and not 1 <= number < 1e6:
        raise ValueError("it must be a number of at least 1, such as 4, or 0")
    return number


def count(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError("it must be a whole number of at least 1")
    return int(value)


def count_or_none(value: str) -> int:
    if not value.isdecimal():
        raise ValueError("it must be a whole number, or 0")
    return int(value)


def days(value: str) -> float:
    """Seconds, at least two days: uses are noted once a day."""
    number = _number(value)  # an agent gets its settings as numbers
    if math.isnan(number):
        number = parse_span(value)
    if not 2 * 86400.0 <= number < 1e9:
        raise ValueError("it must be a time such as 30d, at least 2d: a use may be known a day late")
    return number


def switch(value: str) -> bool:
    if value.lower() in ON:
        return True
    if value.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("it must be 1 or 0")


def name(value: str) -> str:
    """A namespace or a profile, which is also the name of a directory."""
    if value.startswith("."):
        raise ValueError("it must not begin with '.'")
    if not value or len(value) > 64 or not all(c.isalnum() or c in "-_." for c in value):
        raise ValueError("it must be 1 to 64 letters, digits, '-', '_' or '.'")
    return value


def job(value: str) -> str:
    if len(value) > LONGEST_JOB or not value.isprintable():
        raise ValueError(f"it must be at most {LONGEST_JOB} characters, all printable")
    return value


def address(value: str) -> str:
    """``host:port``; for a port alone, this node's loopback address."""
    host, colon, port = value.strip().rpartition(":")
    host = host if colon else "127.0.0.1"
    if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise ValueError("it must be a port, as 9464, or host:port, as 0.0.0.0:9464 for all of this node's addresses")
    return f"{host}:{int(port)}"


def one_of(*choices: str, any_case: bool = False) -> Callable[[str], str]:
    def parse(value: str) -> str:
        chosen = value.lower() if any_case else value
        if chosen not in choices:
            raise ValueError(f"it must be {', '.join(choices[:-1])} or {choices[-1]}")
        return chosen

    return parse
