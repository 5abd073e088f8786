"""For the site: a link to a file outside of docs/ becomes the file's name."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """mkdocs calls it with each page's text."""
    return _OUTSIDE.sub(lambda found: f"{found[1]} (`{posixpath.normpath(found[2][3:])}` in the repository)", markdown)
