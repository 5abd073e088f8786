"""Compiles of Triton, as requests: of kernels, and of the C modules that it builds with the host's compiler."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kcoord.backends.triton.inputs import Inputs


class Kernel(NamedTuple):
    """One compile, as Triton's `compile` has it in its local variables. `digest` is Triton's key, `home` its directory.

    `problem`: why `digest` does not hold all inputs. `inputs` are as they were when the key was made, and `text` is what Triton
    made it of; `files` are the names that Triton stored.
    """

    name: str
    digest: str
    home: Path
    source: Any
    triton_target: Any
    options: Any
    problem: str = ""
    inputs: tuple[Inputs, ...] = ()
    text: str = ""
    files: tuple[str, ...] = ()


PARTS = ("src", "language", "include_dirs", "library_dirs", "libraries", "ccflags")


@dataclass(frozen=True)
class Module:
    """`digest` is Triton's key, and `cache` its cache directory. `build` are the `PARTS` that `triton.runtime.build` makes it of;
    empty if something else builds it.
    """

    filename: str
    digest: str
    cache: Path
    build: Mapping[str, Any] = field(default_factory=dict)


class Purpose(threading.local):
    """The purpose of the current thread's compiles, if it is not their use.

    `lists`: the request is all that is wanted. `replays`: of a recipe. `tries`: of several configurations one will be used.
    `prepares`: of a launcher that no launch needs yet. With `waits` a replay, and what it prepares, waits for other ranks.
    """

    lists = replays = tries = prepares = False
    waits = True

    @contextlib.contextmanager
    def being(self, **purpose: bool) -> Iterator[None]:
        before = dict(vars(self))
        vars(self).update(purpose)
        try:
            yield
        finally:
            vars(self).clear()
            vars(self).update(before)


purpose = Purpose()


class Settled(BaseException):
    """Ends a compile that has no more to do for its purpose. No hook's guard may catch it.

    `how` is ``loaded``, ``busy`` (another rank is at it), ``compiled``, or ``listed``: then `compile` has the local variables of
    Triton's `compile`.
    """

    def __init__(self, how: str, compile: Mapping[str, Any] | None = None) -> None:
        super().__init__(how)
        self.how, self.compile = how, compile or {}
