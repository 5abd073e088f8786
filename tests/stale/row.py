"""A row of the stale-hit matrix: one thing that compiled code depends on, and how it comes to change.

The change is described twice, because caches forget in two ways: as an edit of the files between two processes, and as what
is done to the living objects of one process. A row says nothing about keys: what must be right is the compiled code.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

Both = tuple[str | None, str | None]  # before and after the change


@dataclass(frozen=True)
class Row:
    """`call` is evaluated in the namespace of the module `subject`; so are the statements `change` and `undo`."""

    what: str
    subject: str
    call: str
    edit: tuple[str, str] | None = None
    """A text that occurs once in the row's files, and what replaces it there. None: no file changes."""
    change: str = ""
    undo: str = ""
    names: str = ""
    """What an error must name, a regular expression, if the change is answered by one. Empty: there must be none."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Further files beside ``subject.py``. In all of them ``{what}`` is the row's own; those in a ``bin`` are programs."""
    added: Mapping[str, str] = field(default_factory=dict)
    """Files that are only there after the change."""
    environ: Mapping[str, Both] = field(default_factory=dict)
    """Variables of this row; None is unset, ``{row}`` the directory of its files."""
    device: Both = (None, None)
    """Target and ordinal of the current device, as in ``cuda:90#0``. None: whatever there is without a row's say."""
    edits_live: bool = False
    """Whether the edit is made under the running process too, before the statements of `change`."""
    refuses: bool = False
    """Whether a `KeyFactorError` is a right answer, too: what the row depends on has no identity."""
    compiles: int = 1
    """How many compiles the first call makes: those of the functions that it calls count, too."""
    shared: bool = True
    """Whether another process, with nothing changed, is served what the first compiled."""
    stock: frozenset[str] = frozenset()
    """Where Triton without kcoord is stale: in the ``same`` process, in a ``new`` one."""

    def __str__(self) -> str:
        return self.what

    def named_in(self, error: str) -> bool:
        return re.search(rf"(?<!\w)(?:{self.names})(?!\w)", error) is not None

    @property
    def package(self) -> str:
        return "row_" + re.sub(r"\W+", "_", self.what)

    def home(self, tree: Path) -> Path:
        return tree / self.package

    def write(self, tree: Path, after: bool) -> None:
        """Its files below `tree`, as they are before or after the edit."""
        texts = {n: textwrap.dedent(t) for n, t in {"subject.py": self.subject, **self.files}.items()}
        texts = {n: t.replace("{what}", self.what) for n, t in texts.items()}
        if self.edit is not None:
            old, new = self.edit
            (name,) = [n for n, text in texts.items() for _ in range(text.count(old))]
            if after:
                texts[name] = texts[name].replace(old, new)
        for name, text in texts.items():
            path = self.home(tree) / name
            _write(path, text)
        for name, text in self.added.items():
            if after:
                _write(self.home(tree) / name, text)
            else:
                (self.home(tree) / name).unlink(missing_ok=True)

    def variables(self, tree: Path, after: bool) -> dict[str, str | None]:
        row = str(self.home(tree))
        return {
            n: v if v is None else v.replace("{row}", row) for n, v in ((n, b[after]) for n, b in self.environ.items())
        }


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if path.parent.name == "bin":
        path.chmod(0o755)
