"""The WSGI application of scrapes: ``GET /metrics``, with a page that is kept for a second."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kcoord.agent.http_service import Kept
from kcoord.agent.metrics.prometheus import CONTENT_TYPE, Page

_FRESH = 1.0  # seconds that a page is served again
_KNOWN_METHODS = frozenset({"HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Scrapes:
    """A page that is at most `_FRESH` seconds old."""

    def __init__(self, page: Page) -> None:
        self._fresh = Kept(page.render, _FRESH)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, headers, kind = environ["REQUEST_METHOD"], [("Server", "kcoord")], "text/plain"
        if method != "GET":
            status = "405 Method Not Allowed" if method in _KNOWN_METHODS else "501 Not Implemented"
            text = b"" if method == "HEAD" else b"there is only GET\n"
            headers.append(("Allow", "GET"))
        elif environ["PATH_INFO"] != "/metrics":
            status, text = "404 Not Found", b"there is only /metrics\n"
        else:
            status, text, kind = "200 OK", self._fresh(), CONTENT_TYPE
        start_response(status, [*headers, ("Content-Type", kind), ("Content-Length", str(len(text)))])
        return [text]
