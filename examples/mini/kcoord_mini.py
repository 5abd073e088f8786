"""kcoord's adapter of `mini`, in a package of its own: this file, its declaration, and the entry point in pyproject.toml."""

import functools
import os
import tempfile
from typing import NamedTuple

import mini

from kcoord import GPUTarget, Scope
from kcoord.backends import Backend

stock = mini.compile


class Source(NamedTuple):
    name: str
    text: str


class MiniBackend(Backend):
    name = "mini"
    scope = Scope.TARGET  # the code depends on the GPU's architecture alone
    variables = {"MINI_FLAGS": "optimizations"}  # noqa: RUF012 - they are in the key

    # The key: equal keys mean interchangeable code.

    def label(self, request):
        return request.name

    def factors(self, request):
        return {"source": request.text, "arch": mini.ARCH}

    def trees(self, request):
        return [mini.__file__]

    def target(self, request):
        return GPUTarget.parse(f"cuda:{mini.ARCH.removeprefix('sm_')}")

    # The artifact.

    def compile(self, request, staging):
        """With an empty cache: mini's own would answer with code that was made under other flags."""
        before = os.environ.get("MINI_CACHE_DIR")
        with tempfile.TemporaryDirectory(prefix="mini-") as directory:
            os.environ["MINI_CACHE_DIR"] = directory
            try:
                return stock(request.name, request.text, staging)
            finally:
                os.environ.pop("MINI_CACHE_DIR")
                if before is not None:
                    os.environ["MINI_CACHE_DIR"] = before

    def required(self, request):
        return ("kernel.ptx",)

    def load(self, request, artifact):
        return mini.Kernel(artifact.path / "kernel.ptx")


backend = MiniBackend()


def hook():
    """kcoord calls it once the job has imported `mini`."""
    mini.compile = compile


@functools.wraps(stock)
def compile(name, source, directory=None):
    if directory is not None:  # somebody who wants the files where they are
        return stock(name, source, directory)
    return backend.obtain(Source(name, source), lambda: stock(name, source))
