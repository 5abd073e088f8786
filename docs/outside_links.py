"""For the site: what a page links to in the repository, outside of docs/, is named there and no link."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Called by mkdocs with each page's text."""
    return _OUTSIDE.sub(lambda found: f"{found[1]} (`{posixpath.normpath(found[2][3:])}` in the repository)", markdown)
