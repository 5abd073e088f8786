"""The content of a small file: a line that names its format, the SHA-256 of its body, and the body. A torn file is told from a
whole one.
"""

from __future__ import annotations

import hashlib

CHECK = hashlib.sha256().digest_size  # bytes between the line and the body


def with_check(head: bytes, body: bytes) -> bytes:
    return head + hashlib.sha256(body).digest() + body


def body_of(head: bytes, content: bytes) -> bytes:
    """Raises ValueError if `content` is torn, or has another format than `head` names."""
    start = len(head) + CHECK
    body = content[start:]
    if content[:start] != head + hashlib.sha256(body).digest():
        raise ValueError("it is torn, or another version's")
    return body
