"""kcoord's adapter of `mini`, in a package of its own: this file, and the entry point in pyproject.toml."""

import contextlib
import functools
import os
import tempfile
from typing import NamedTuple

from kcoord import GPUTarget, Scope
from kcoord.backends import Backend


class Source(NamedTuple):
    name: str
    text: str


class MiniBackend(Backend):
    name = "mini"
    modules = ("mini",)  # `hook` is called when the job imports it, and never if it does not
    scope = Scope.TARGET  # the code depends on the GPU's architecture alone
    variables = {"MINI_FLAGS": "optimizations"}  # noqa: RUF012 - they are in the key

    def hook(self):
        import mini

        stock = mini.compile
        if hasattr(stock, "__wrapped__"):
            return

        @functools.wraps(stock)
        def compile(name, source, directory=None):
            if directory is not None:  # somebody who wants the files where they are
                return stock(name, source, directory)
            return self.obtain(Source(name, source), lambda: stock(name, source))

        mini.compile = compile

    # The key: equal keys mean interchangeable code.

    def label(self, request):
        return request.name

    def factors(self, request):
        import mini

        return {"source": request.text, "arch": mini.ARCH}

    def trees(self, request):
        import mini

        return [mini.__file__]

    def target(self, request):
        import mini

        return GPUTarget.parse(f"cuda:{mini.ARCH.removeprefix('sm_')}")

    # The artifact.

    def compile(self, request, staging):
        import mini

        return mini.compile.__wrapped__(request.name, request.text, staging)

    @contextlib.contextmanager
    def lower_caches(self, key):
        """An empty cache for each compile: mini's own would answer with code that was made under other flags."""
        before = os.environ.get("MINI_CACHE_DIR")
        with tempfile.TemporaryDirectory(prefix="mini-") as directory:
            os.environ["MINI_CACHE_DIR"] = directory
            try:
                yield
            finally:
                os.environ.pop("MINI_CACHE_DIR")
                if before is not None:
                    os.environ["MINI_CACHE_DIR"] = before

    def required(self, request):
        return ("kernel.ptx",)

    def load(self, request, artifact):
        import mini

        return mini.Kernel(artifact.path / "kernel.ptx")
