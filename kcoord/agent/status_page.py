"""The agent's status as a live page, over HTTP at KCOORD_PAGE: ``GET /``, and ``GET /status.json``, which the page asks for.

Read-only. The page may hold any text that a rank has sent: it travels as JSON without a ``<``, and the page's script shows it as
text only. The page's own policy lets no other script run and nothing be fetched from elsewhere. A request by another name than
this node's is refused, so that no page of the web reaches it by a name of its own (DNS rebinding). Not guaranteed: any secrecy on
the node. Whoever reaches the port reads the names of kernels and jobs; settings are left out.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import platform
import re
import time
from collections.abc import Callable, Iterable
from html import escape
from importlib.resources import files
from typing import Any

_STALE = 5.0  # seconds after which a copied status is none: the agent hangs
_LONGEST_HOST = 300  # characters
_HEADERS = [
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
]


class StatusPage:
    """The WSGI application of the page at `host`. It shows the status that the agent's pulse copied last."""

    def __init__(self, host: str, stale: float = _STALE) -> None:
        """`stale`: seconds after which a status is too old to be shown."""
        self._names, self._stale = frozenset({"localhost", platform.node().lower(), host.lower()}), stale
        self._before, self._after, self._policy = _parts()
        self._copied: tuple[float, dict[str, Any]] = (-stale, {})

    def look(self, status: dict[str, Any]) -> None:
        """Show `status`, which nobody changes any more, without the settings."""
        shown = {name: value for name, value in status.items() if name != "settings"}
        self._copied = time.monotonic(), shown | {"now": time.time()}

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        status, kind, text, more = self._answer(
            environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("HTTP_HOST", "")
        )
        about = [("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(text)))]
        start_response(status, [*_HEADERS, *about, *more])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else text]

    def _answer(self, method: str, path: str, host: str) -> tuple[str, str, bytes, list[tuple[str, str]]]:
        if not self._is_ours(host):
            text = b"open this page by an IP address, localhost or the node's name: another name is refused\n"
            return "403 Forbidden", "text/plain", text, []
        if method not in ("GET", "HEAD"):
            return "405 Method Not Allowed", "text/plain", b"this page is only read\n", [("Allow", "GET, HEAD")]
        if path not in ("/", "/status.json"):
            return "404 Not Found", "text/plain", b"there are / and /status.json\n", []
        copied, status = self._copied
        if time.monotonic() > copied + self._stale:
            return "503 Service Unavailable", "text/plain", b"the agent does not answer\n", []
        found = json.dumps(status, default=str).encode()
        if path == "/status.json":
            return "200 OK", "application/json", found, []
        page = self._before + found.replace(b"<", b"\\u003c") + self._after
        return "200 OK", "text/html", page, [("Content-Security-Policy", self._policy)]

    def _is_ours(self, host: str) -> bool:
        """True for an IP address, which no name server can move, and for this node's own names."""
        name = re.sub(r":\d*$", "", host[:_LONGEST_HOST]).lower()
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
        except ValueError:
            return False
        return True


def _parts() -> tuple[bytes, bytes, str]:
    """The page before and after the status that it begins with, and its Content-Security-Policy."""
    resources = files("kcoord.agent").joinpath("page")
    script = resources.joinpath("status.js").read_text(encoding="utf-8")
    style = resources.joinpath("status.css").read_text(encoding="utf-8")
    template = resources.joinpath("status.html").read_text(encoding="utf-8")
    values = {"script": script, "style": style, "node": escape(platform.node()), "status": "{{status}}"}
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)
    before, _, after = page.partition("{{status}}")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return before.encode(), after.encode(), policy


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
