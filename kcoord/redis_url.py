"""``KCOORD_REDIS_URL``: parsed, read from its file, and shown without its password. Imports no Redis client."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from kcoord.errors import SettingsError
from kcoord.secret_files import read_secret

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
_PORT, _SENTINEL_PORT = 6379, 26379
_PORTS = range(1, 65536)
_UNREADABLE = (
    "it cannot be parsed: a port is a number from 1 to 65535; in a password, write / ? # @ : as %2F %3F %23 %40 %3A"
)


@dataclass(frozen=True)
class Sentinels:
    """``redis+sentinel://[user:password@]host[:port][,host[:port]…]/service[/db]``, ``rediss+sentinel://`` with TLS to all.

    The credentials are the master's; the sentinels' own are ``?sentinel_username=…&sentinel_password=…``. `options` is a plain
    Redis URL with the credentials, the database and the rest of the query; its host means nothing.
    """

    addresses: tuple[tuple[str, int], ...]
    service: str
    options: str
    username: str | None = None
    password: str | None = None

    @classmethod
    def of(cls, url: str) -> Sentinels | None:
        """None if the URL names no sentinels. Raises ValueError without any secret."""
        whole, credentials, hosts, rest = _parts(url)
        scheme, _, kind = whole.partition("+")
        if kind != "sentinel":
            return None
        parts = urlsplit("//hosts" + rest)  # `urlsplit` knows no list of hosts
        service, _, db = parts.path.lstrip("/").partition("/")
        if not service:
            raise ValueError("it names no service: redis+sentinel://host:26379,host:26379/service/0")
        if db and not db.isdecimal():
            raise ValueError("after the service it must have the number of a database")
        query = parse_qsl(parts.query)
        own = {name: value for name, value in query if name in ("sentinel_username", "sentinel_password")}
        rest = urlencode([(name, value) for name, value in query if name not in own])
        return cls(
            tuple(_address(host, _SENTINEL_PORT) for host in hosts.split(",")),
            unquote(service),
            f"{scheme}://{credentials}master/{db or 0}" + (f"?{rest}" if rest else ""),
            own.get("sentinel_username"),
            own.get("sentinel_password"),
        )


@dataclass(frozen=True)
class Nodes:
    """``redis://[user:password@]host[:port][,host[:port]…][/0]``: one server, or some nodes of a Redis Cluster.

    `first` is the URL with the first of them alone. A URL of sentinels or of a Unix socket names no nodes.
    """

    addresses: tuple[tuple[str, int], ...]
    first: str

    @classmethod
    def of(cls, url: str) -> Nodes:
        """Raises ValueError without any secret."""
        scheme, credentials, hosts, rest = _parts(url)
        if scheme not in ("redis", "rediss"):
            return cls((), url)
        listed = hosts.split(",")
        return cls(tuple(_address(host, _PORT) for host in listed), f"{scheme}://{credentials}{listed[0]}{rest}")


def _parts(url: str) -> tuple[str, str, str, str]:
    """The scheme, credentials with their @, hosts, and the rest, of a URL that may list several hosts."""
    scheme, _, rest = url.partition("://")
    place = re.match(r"[^/?#]*", rest)
    assert place is not None  # the pattern matches the empty string
    credentials, at, hosts = place[0].rpartition("@")
    return scheme.lower(), credentials + at, hosts, rest[place.end() :]


def parse_redis_url(value: str) -> str:
    """`value` without surrounding white space, if a client can use it. Raises ValueError without any secret."""
    value = value.strip()
    if any(map(str.isspace, value)):
        raise ValueError("it holds white space: in a password, write a space as %20")
    if Sentinels.of(value) is not None:
        return value
    if _parts(value)[0] not in SCHEMES:
        raise ValueError(
            "it must look like redis://[user:password@]host:port/0, rediss://…, unix:///path "
            "or redis+sentinel://host:port,host:port/service"
        )
    scheme, _, _, rest = _parts(value)
    if scheme != "unix" and "@" in rest.partition("=")[0]:  # the host stands in the path, or behind a #
        raise ValueError(_UNREADABLE)
    first = Nodes.of(value).first
    try:
        place = urlsplit(first)
    except ValueError:  # its text may hold a part of the password
        raise ValueError(_UNREADABLE) from None
    db = place.path.strip("/")
    if place.scheme == "unix" and not db:
        raise ValueError("it names no socket: unix:///path")
    if place.scheme != "unix" and db and not db.isdecimal():
        raise ValueError("after the host it must have the number of a database, as in redis://host:6379/0")
    return value


def read_redis_url(path: Path) -> str:
    """The URL in a file, without surrounding white space. Raises `SettingsError` without the content."""
    name = f"KCOORD_REDIS_URL_FILE={path}"
    try:
        url = read_secret(name, path).decode().strip()
        if not url.isprintable():
            raise ValueError("it must be one line, a URL")
        return parse_redis_url(url)
    except UnicodeDecodeError:  # its text holds the content
        raise SettingsError(f"{name}: it must be one line, a URL") from None
    except ValueError as error:
        raise SettingsError(f"{name}: {error}") from None


def without_password(url: str) -> str:
    """One line that names the server: no credentials, and no query. Of a URL that cannot be parsed, its scheme alone."""
    scheme = url.partition("://")[0].lower()
    try:
        parse_redis_url(url)
    except ValueError:
        return f"{scheme}://***" if scheme in SCHEMES else "***"
    _, credentials, hosts, rest = _parts(url)
    shown = f"{scheme}://{credentials and '***@'}{hosts}{re.split('[?#]', rest)[0]}"
    return shown if shown.isprintable() else repr(shown)


def _address(text: str, port_if_none: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:  # its text may hold a part of the password
        raise ValueError(_UNREADABLE) from None
    if not host:
        raise ValueError("it names no host")
    if port is not None and port not in _PORTS:
        raise ValueError(_UNREADABLE)
    return unquote(host), port or port_if_none
