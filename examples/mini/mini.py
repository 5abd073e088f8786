"""A compiler in a few lines: an expression becomes code for one GPU. It has a cache of its own, as most compilers have."""

import hashlib
import os
from pathlib import Path

ARCH = "sm_90"


class CompileError(Exception):
    """The source is wrong."""


class Kernel:
    """Loaded code."""

    def __init__(self, path):
        self.code = Path(path).read_text()


def compile(name, source, directory=None):
    """The kernel of `source`, an arithmetic expression. Its files are written to `directory`, by default the cache."""
    digest = hashlib.sha256(source.encode()).hexdigest()  # forgets MINI_FLAGS: a bug that users of this cache meet
    path = cache_dir() / f"{digest}.ptx"
    if not path.exists():
        text = generate(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if directory is not None:
        (directory / "kernel.ptx").write_bytes(path.read_bytes())
    return Kernel(path)


def generate(source):
    """The compiler proper."""
    try:
        value = eval(source, {})
    except (SyntaxError, NameError, ArithmeticError) as error:
        raise CompileError(f"{source}: {error}") from None
    return f".target {ARCH}\n// {os.environ.get('MINI_FLAGS', '')}\nmov {value}\n"


def cache_dir():
    return Path(os.environ.get("MINI_CACHE_DIR") or Path.home() / ".mini")
