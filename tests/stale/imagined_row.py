"""The shapes of imagined rows."""

from __future__ import annotations

from tests.stale.generic_values import HEAD
from tests.stale.row import Row

Edit = tuple[str, str] | None


def reads(what: str, setup: str, expression: str, edit: Edit, change: str, undo: str, **more: object) -> Row:
    """A compile function whose output is `expression`, in a module that `setup` prepares."""
    return does(what, setup, f"out = {expression}", edit, change, undo, **more)


def swaps(what: str, setup: str, expression: str, edit: Edit, place: str, other: str, **more: object) -> Row:
    """One whose change puts `other` in the `place`, and back."""
    setup = f"{setup}\nkept = {_as_kept(place)}"
    return reads(what, setup, expression, edit, f"{place} = {other}", f"{place} = kept", **more)


def does(
    what: str, setup: str, body: str, edit: Edit, change: str, undo: str, choices: str = "", **more: object
) -> Row:
    """A compile function, under `choices` of ``compile_once``, that executes `body`, which leaves its output in ``out``."""
    lines = [f"@compile_once({choices})", "def build(x, *, staging):", *(f"    {each}" for each in body.splitlines())]
    text = "\n".join([HEAD, setup, *lines, '    (staging / "kernel").write_text(str(out))', ""])
    return Row(what, text, "build(3)", edit, change, undo, **more)  # type: ignore[arg-type]


def _as_kept(place: str) -> str:
    """An attribute as its class keeps it: a static method, a property."""
    owner, _, name = place.rpartition(".")
    return f"vars({owner}).get({name!r})" if owner else place
