"""``python boot.py -m MODULE …`` or ``python boot.py - SCRIPT …``: hook this rank's compilers, then run the module or script.

The script runs in the real ``__main__``, as under ``python SCRIPT``: its definitions can be pickled after it has returned,
`__file__` stays valid after a `chdir`, and `sys.path` is the usual one.
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
    from kcoord.backends.registry import install_openly

    _, kind, target, *arguments = sys.argv
    install_openly()
    sys.argv = [target, *arguments]
    safe_path = getattr(sys.flags, "safe_path", False)
    if kind == "-m":
        if not safe_path:
            sys.path.insert(0, os.getcwd())
        _warm_up()
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # what `python -m` calls
    elif os.path.isdir(target) or target.endswith((".zip", ".pyz")):
        runpy.run_path(target, run_name="__main__")
    else:
        if not safe_path:
            sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
        _warm_up()
        _run(os.path.abspath(target))


def _run(path: str) -> None:
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    names = sys.modules["__main__"].__dict__
    loader = SourceFileLoader("__main__", path)
    for name in [n for n in names if n not in ("__name__", "__builtins__")]:
        del names[name]  # from here on, this module has no globals
    names.update(__file__=path, __loader__=loader, __spec__=None, __package__=None, __doc__=None, __cached__=None)
    exec(code, names)


def _warm_up() -> None:
    """Compile a named profile together with the other ranks, before the script begins, if no cores idle for the node's pool."""
    if os.environ.get("KCOORD_PROFILE", "off") == "off":
        return
    from kcoord.backends.fail_open import fails_open

    fails_open(lambda: None)(_replay)()


def _replay() -> None:
    from kcoord.packs.automatic import is_automatic
    from kcoord.rank.connect import connect
    from kcoord.rank.pool_start import has_cores_to_spare
    from kcoord.replay.warmup import replay
    from kcoord.telemetry.events import plain

    settings = connect().settings
    if is_automatic(settings.profile):
        return  # nobody asked for it, and a script may set variables before it imports anything
    if settings.pool_workers and has_cores_to_spare(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        return
    report = replay()
    if report is not None and os.environ.get("RANK", "0") == "0":
        print(
            f"kcoord: profile {os.environ['KCOORD_PROFILE']}, rank 0: {plain(str(report))}", file=sys.stderr, flush=True
        )


if __name__ == "__main__":
    main()
