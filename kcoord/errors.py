"""Exceptions of kcoord.

Almost all stay inside: kcoord fails open, and a backend answers each by a compile of its own. Four reach a user's code:
`SettingsError` (a setting is wrong), `KeyFactorError` (a value has no stable identity), `GlobalsDrift` (a value that a compiled
function reads has changed) and `CompileFailed` (the generic API's key failed to compile here, after it had elsewhere).
"""

from __future__ import annotations


class KcoordError(Exception):
    """Base of all exceptions of kcoord."""


class SettingsError(KcoordError):
    """A setting cannot be used. The message is one line: it names the setting and the remedy."""


class KeyFactorError(KcoordError, TypeError):
    """A key factor has no identity that is stable across processes. The message says how to give it one."""


class GlobalsDrift(KcoordError):
    """A value that a compile function reads has changed since this process compiled the function.

    `changes` are lines such as ``globals train.TILE: 64 → 128``.
    """

    def __init__(self, name: str, changes: tuple[str, ...], hint: str = "") -> None:
        super().__init__(name, changes, hint)
        self.name, self.changes, self.hint = name, changes, hint

    def __str__(self) -> str:
        text = f"{self.name} was compiled in this process with other values: {'; '.join(self.changes)}"
        return f"{text}: {self.hint}" if self.hint else text


class CompileFailed(KcoordError):
    """This rank could not compile the key, after another rank had failed to.

    `__cause__` is this rank's own exception. `log` is the other rank's traceback or compiler output, `where` its host,
    pid and rank.
    """

    def __init__(self, name: str, log: str, where: str = "") -> None:
        super().__init__(name, log, where)
        self.name, self.log, self.where = name, log, where

    def __str__(self) -> str:
        cause = self.__cause__
        own = f": {type(cause).__name__}: {cause}" if cause is not None else ""
        return (
            f"{self.name} failed to compile{own}\nIt had failed{f' on {self.where}' if self.where else ''}:\n{self.log}"
        )


class ArtifactInvalid(KcoordError):
    """An artifact's files are incomplete or corrupt, or belong to another artifact."""


class ArtifactUnreadable(ArtifactInvalid):
    """This process cannot read an artifact's files now (too many open files, no permission); they may be intact."""


class ArtifactDistrusted(ArtifactInvalid):
    """None of our signing keys vouches for an artifact. `unknown_key`: its signer's key is not one of ours, so others may trust
    it.

    `fault` is equal for all artifacts with the same reason; `remedy` says what to do.
    """

    def __init__(self, fault: str, remedy: str, *, unknown_key: bool = False, where: str = "") -> None:
        super().__init__(fault, remedy)
        self.fault, self.remedy, self.unknown_key, self.where = fault, remedy, unknown_key, where

    def __str__(self) -> str:
        return f"{self.where or 'an artifact'}: {self.fault}: {self.remedy}"

    def of(self, where: object) -> ArtifactDistrusted:
        """The same fault, of the file at `where`."""
        return ArtifactDistrusted(self.fault, self.remedy, unknown_key=self.unknown_key, where=str(where))


class StoreError(KcoordError):
    """The store, or a directory on it, cannot be used. The message ends with the remedy.

    `remedy` alone, without a path, is equal for one fault of many keys. `passing`: a disk, a mount or a server may recover while
    the job runs; else the setting itself is wrong.
    """

    def __init__(self, message: str, remedy: str = "", *, passing: bool = False) -> None:
        super().__init__(message)
        self.remedy, self.passing = remedy or message, passing


class LeaseUnavailable(KcoordError):
    """A lease service cannot answer now. Callers go on without it, and lose efficiency, not correctness.

    `told`: another notice names the same fault.
    """

    def __init__(self, message: str, *, told: bool = False) -> None:
        super().__init__(message)
        self.told = told


class ProtocolError(KcoordError):
    """A peer sent a malformed frame, or one of another version."""


class AgentUnavailable(KcoordError):
    """No agent runs, or it did not answer in time."""
