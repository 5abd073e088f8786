"""``python boot.py -m MODULE …`` or ``python boot.py - SCRIPT …``: hook this rank's compilers, then run what torchrun would.

The script runs in the real ``__main__``, as under ``python SCRIPT``: what it defines can be pickled after it has returned,
`__file__` stays true after a `chdir`, and `sys.path` is what it would be.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this file's own directory: its neighbours must not shadow anybody's modules


def main() -> None:
    """`sys.argv` is ``[boot, "-m" or "-", module or script, arguments…]``."""
    _, kind, target, *arguments = sys.argv
    _hook()
    sys.argv = [target, *arguments]
    safe_path = getattr(sys.flags, "safe_path", False)
    if kind == "-m":
        if not safe_path:
            sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # what `python -m` calls
    elif os.path.isdir(target) or target.endswith((".zip", ".pyz")):
        runpy.run_path(target, run_name="__main__")
    else:
        if not safe_path:
            sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
        _run(os.path.abspath(target))


def _run(path: str) -> None:
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    names = sys.modules["__main__"].__dict__
    loader = SourceFileLoader("__main__", path)
    for name in [n for n in names if n not in ("__name__", "__builtins__")]:
        del names[name]  # from here on, nothing of this module's globals is there
    names.update(__file__=path, __loader__=loader, __spec__=None, __package__=None, __doc__=None, __cached__=None)
    exec(code, names)


def _hook() -> None:
    from kcoord.backends.base import notices
    from kcoord.backends.install import install
    from kcoord.errors import KcoordError

    try:
        install()
    except KcoordError as error:
        notices.tell(f"{error}; this rank runs without kcoord")


if __name__ == "__main__":
    main()
