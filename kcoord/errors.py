"""What kcoord raises.

Almost all of it stays inside: kcoord fails open, and a backend turns every one of these into "compile it
yourself". Four reach a user's code: `SettingsError` (a setting is wrong), `KeyFactorError` (a value has no stable
identity), `GlobalsDrift` (a value that a compiled function reads has changed) and `CompileFailed` (the generic
API's leader, somewhere else, could not compile).
"""

from __future__ import annotations


class KcoordError(Exception):
    """Base of everything that kcoord raises."""


class SettingsError(KcoordError):
    """A setting cannot be used. The message is one line: it names the setting and the remedy."""


class KeyFactorError(KcoordError, TypeError):
    """A key factor has no identity that is stable across processes. The message says how to give it one."""


class GlobalsDrift(KcoordError):
    """Something that a compile function reads has changed since it was compiled in this process.

    `changes` are lines such as ``globals train.TILE: 64 → 128``.
    """

    def __init__(self, name: str, changes: tuple[str, ...], hint: str = "") -> None:
        super().__init__(name, changes, hint)
        self.name, self.changes, self.hint = name, changes, hint

    def __str__(self) -> str:
        text = f"{self.name} was compiled in this process with other values: {'; '.join(self.changes)}"
        return f"{text}: {self.hint}" if self.hint else text


class CompileFailed(KcoordError):
    """The rank that compiled this key failed.

    `log` is the leader's traceback or compiler output, `where` its host, pid and rank.
    """

    def __init__(self, name: str, log: str, where: str = "") -> None:
        super().__init__(name, log, where)
        self.name, self.log, self.where = name, log, where

    def __str__(self) -> str:
        return f"{self.name} failed to compile{f' on {self.where}' if self.where else ''}:\n{self.log}"


class ArtifactInvalid(KcoordError):
    """Files that claim to be an artifact are not whole, or not the artifact that was asked for."""


class ArtifactUnreadable(ArtifactInvalid):
    """This process cannot read the files now (too many open files, no permission): nothing is known of the artifact."""


class ArtifactDistrusted(ArtifactInvalid):
    """No signing key of ours vouches for it. `foreign`: a key that we do not have may: it is not ours to judge.

    `fault` is the same for all that has one reason; `remedy` says what to do.
    """

    def __init__(self, fault: str, remedy: str, *, foreign: bool = False, where: str = "") -> None:
        super().__init__(fault, remedy)
        self.fault, self.remedy, self.foreign, self.where = fault, remedy, foreign, where

    def __str__(self) -> str:
        return f"{self.where or 'an artifact'}: {self.fault}: {self.remedy}"

    def of(self, where: object) -> ArtifactDistrusted:
        """The same of what lies at `where`."""
        return ArtifactDistrusted(self.fault, self.remedy, foreign=self.foreign, where=str(where))


class StoreError(KcoordError):
    """The store, or a directory on it, cannot be used. The message ends with the remedy.

    `remedy` alone, without a path, is the same for one fault of many keys. `passing`: a disk, a mount or a server may be mended
    while the job runs; else the setting is wrong, and stays so.
    """

    def __init__(self, message: str, remedy: str = "", *, passing: bool = False) -> None:
        super().__init__(message)
        self.remedy, self.passing = remedy or message, passing


class LeaseUnavailable(KcoordError):
    """A lease service cannot answer now. Efficiency is lost, not correctness: callers go on without it."""


class ProtocolError(KcoordError):
    """A peer sent a frame that this version does not understand."""


class AgentUnavailable(KcoordError):
    """There is no agent to speak to, or it did not answer in time."""
