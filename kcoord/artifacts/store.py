"""The store: the shared directory that carries artifacts between nodes and jobs.

An artifact is ``v1/objects/<ab>/<digest>/`` with two files, ``manifest.msgpack`` and ``payload.tar.zst``: three
inodes and one short sequential read, which is what NFS servers and quotas want. Only the agent comes here.

A final name is looked up only when this node has been told that it is there, or by the key's leader, while nobody
else publishes: an NFS client caches a missing name for up to a minute.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kcoord.artifacts.access import doubts
from kcoord.artifacts.manifest import LARGEST_MANIFEST, Manifest
from kcoord.artifacts.payload import pack, unpack, with_payload
from kcoord.artifacts.signing import MANIFEST, OFF, Trust
from kcoord.artifacts.store_root import StoreRoot
from kcoord.errors import ArtifactDistrusted, ArtifactInvalid, StoreError
from kcoord.files.faults import (
    store_error,
)
from kcoord.files.naming import (
    staging_name,
)
from kcoord.files.reading import read_plain
from kcoord.files.rename import (
    refresh_names,
    rename_into_place,
    set_aside,
    write_files,
)

_MANIFEST, _PAYLOAD = "manifest.msgpack", "payload.tar.zst"
_LARGEST_PROBE = 1 << 20
_PUBLISHES = 3
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)  # the last on NFS, of what goes while it is read
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Tell(Protocol):
    """`kcoord.telemetry.events.Notices.tell`."""

    def __call__(self, line: str, *, about: str | None = None) -> object: ...


class Store:
    """One store. Every method may block for as long as the file system does, and raises `StoreError`.

    `trust` says who may have published what is read, and signs what is published; ``tell(line, about=…)`` hears what its policy
    has said, and not refused.
    """

    def __init__(self, root: Path, trust: Trust = OFF, tell: Tell | None = None) -> None:
        self.root, self.trust, self._tell = root, trust, tell
        self._in = StoreRoot(root)
        self.opened = False  # whether `open` has ever returned
        self._refused = 1  # bytes of the last artifact that could not be published

    def open(self) -> str:
        """Create the store if it is new, and return its uuid. Safe to run from many nodes at once.

        Where signatures are required, a store that strangers may rearrange is refused; else it is told.
        """
        uuid = self._in.create()
        self._check_access()
        self.opened = True
        return uuid

    def check(self) -> None:
        """Return if an artifact could be published now, as large (up to a MiB) as the last one that could not.

        Raises `StoreError`. Unlike `open` it makes no store.
        """
        self._in.check(self._refused)

    def _check_access(self) -> None:
        try:
            found = doubts(self.root)
        except OSError as error:
            raise store_error(error, self.root) from error
        for doubt in found:
            if self.trust.required:
                raise StoreError(f"{doubt.path}: {doubt.finding}: {doubt.remedy}", f"{doubt.finding}: {doubt.remedy}")
            if self._tell is not None:
                self._tell(f"{doubt.path}: {doubt.finding}: {doubt.remedy}", about=f"access to {doubt.path}")

    def home(self, digest: str) -> Path:
        return self._in.objects / digest[:2] / digest

    def publish(self, manifest: Manifest, contents: dict[str, bytes]) -> str:
        """Publish an artifact, signed if there is a key; return the SHA-256 of the manifest's file (the winner's) that is there.

        Raises `ArtifactDistrusted` if another's is there that is not ours to judge.
        """
        payload = pack(manifest, contents)
        encoded = self.trust.seal(MANIFEST, with_payload(manifest, payload).encode())
        return self.publish_files(manifest.key.digest, encoded, payload)

    def publish_files(self, digest: str, encoded: bytes, payload: bytes) -> str:
        """As `publish`, of an artifact's two files as they are to be in the store, which the caller has verified."""
        why = "another writer's artifact vanished: does something clean the store?"
        for _ in range(_PUBLISHES):
            stated = self._publish_once(digest, encoded, payload)
            if stated is not None:
                return stated
        raise StoreError(f"{self.home(digest)}: {why}", why)

    def _publish_once(self, digest: str, encoded: bytes, payload: bytes) -> str | None:
        """None: another's artifact was there, and is not any more: `kcoord gc` took it away in this moment."""
        staging = self._in.staging / staging_name()
        final = self.home(digest)
        settled = False
        try:
            staging.mkdir(exist_ok=True)  # nobody else has its name: it may be a request that was sent again
            write_files(staging, {_PAYLOAD: payload, _MANIFEST: encoded}, durable=True)
            won = rename_into_place(staging, final, _MANIFEST, self._is_valid, self._in.quarantine, durable=True)
            settled = True
        except (OSError, StoreError) as error:
            self._refused = max(1, min(len(payload), _LARGEST_PROBE))
            if isinstance(error, OSError):
                raise store_error(error, self.root) from error
            raise
        finally:
            if not settled:  # also if a user interrupts it
                self._in.discard(staging)
        if won:
            return manifest_digest(encoded)
        try:
            return manifest_digest(self._read(final).encoded)
        except _Missing:
            return None
        except (ArtifactInvalid, OSError) as error:
            why = "another writer's artifact cannot be read any more: look at the store's disk"
            raise StoreError(f"{final}: {why}", why) from error

    def fetch(self, digest: str, announced: str | None = None) -> tuple[Manifest, dict[str, bytes], str] | None:
        """The artifact's manifest, its checked contents, and its manifest's SHA-256; None if it is not there.

        `announced` is that SHA-256 as READY gave it: only that artifact will do. What is not whole is read once more, afresh;
        if it is the same then, the leader (`announced` is None) moves it into quarantine. *One* reader's failure, a failing
        read, or one that changes from one time to the next take nothing from the others; nor does a signature by a key that is
        unknown here. What is verified is what was read into memory, and is returned.
        Raises `StoreError` if the file system fails, `ArtifactInvalid` if what is there does not verify.
        """
        final = self.home(digest)
        try:
            if not self._look_again(final.parent):
                return None
            manifest, contents, stated, _ = self._verified(final, announced)
            return manifest, contents, stated
        except _Torn as error:
            if announced is None:
                self._set_aside(final)
            raise error.why from error
        except OSError as error:
            raise store_error(error, final) from error
        except _Missing:
            return None

    def files(self, digest: str) -> tuple[Manifest, bytes, bytes] | None:
        """The artifact's manifest, and its two files as they are, verified; None if it is not there. Nothing is set aside.

        Raises `ArtifactInvalid` if it does not verify.
        """
        final = self.home(digest)
        try:
            manifest, _, _, found = self._verified(final)
            return manifest, found.encoded, found.payload
        except _Torn as error:
            raise error.why from error
        except OSError as error:
            raise store_error(error, final) from error
        except _Missing:
            return None

    def manifest_file(self, digest: str) -> bytes | None:
        """The manifest's file as it is, not verified; None if it is not there. Raises `ArtifactInvalid` for no plain file."""
        try:
            return read_plain(self.home(digest) / _MANIFEST, LARGEST_MANIFEST)
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise store_error(error, self.home(digest)) from error

    def digests(self) -> Iterator[str]:
        """Of all artifacts, by and by. Lists directories: for people, never on a job's way."""
        try:
            for bucket in sorted(p for p in self._in.objects.iterdir() if len(p.name) == 2):
                names: list[str] = []
                with suppress(NotADirectoryError):  # nothing of ours
                    names = os.listdir(bucket)  # noqa: PTH208
                yield from sorted(name for name in names if _DIGEST.fullmatch(name))
        except OSError as error:
            raise store_error(error, self.root) from error

    def manifests(self) -> list[Manifest]:
        """The manifests of all readable artifacts; none where there is no store yet. Lists directories: for people, never on a
        job's way.
        """
        found: list[Manifest] = []
        for digest in self.digests() if os.path.isdir(self._in.objects) else ():  # noqa: PTH112
            with suppress(ArtifactInvalid):
                encoded = self.manifest_file(digest)
                if encoded is not None:
                    found.append(Manifest.decode(encoded))
        return found

    def _look_again(self, bucket: Path) -> bool:
        """Make an NFS client forget that it saw a name of `bucket` missing, or `bucket` itself. False: it is not there."""
        try:
            refresh_names(bucket)
        except FileNotFoundError:
            refresh_names(self._in.objects)
            try:
                refresh_names(bucket)
            except FileNotFoundError:
                return False
        return True

    def _set_aside(self, final: Path) -> None:
        try:
            set_aside(final, self._in.quarantine)
        except OSError as error:
            raise store_error(error, self._in.quarantine) from error

    def _verified(self, final: Path, announced: str | None = None) -> tuple[Manifest, dict[str, bytes], str, _Found]:
        """Raises `_Torn` if what is there is not whole, `ArtifactInvalid` if it cannot be judged, `_Missing`, and OSError."""
        seen = []
        for afresh in (False, True):
            found = None
            try:
                found = self._read(final, afresh)
                return *_checked(final, found, announced, self._judge), found
            except _Another:
                raise
            except ArtifactInvalid as error:
                if isinstance(error, ArtifactDistrusted) and error.unknown_key:
                    raise
                seen.append((found, error))
        (first, _), (second, why) = seen
        if first != second:
            raise ArtifactInvalid(f"{final} is read differently each time: check this node's memory, network and mount")
        raise _Torn(why)

    def _judge(self, final: Path, encoded: bytes) -> None:
        """Raises `ArtifactInvalid` if `encoded` is not to be trusted."""
        doubt = self.trust.doubt(MANIFEST, encoded)
        if doubt is None:
            return
        if self.trust.required:
            raise doubt.of(final)
        if self._tell is not None:
            self._tell(f"{doubt.of(final)}; it is used all the same (KCOORD_TRUST=warn)", about=f"trust: {doubt.fault}")

    def _read(self, final: Path, afresh: bool = False) -> _Found:
        """Both files, or `_Missing`. ESTALE while reading means that somebody removed it: a miss too.

        Raises `ArtifactInvalid` if there are no such files, or their sizes are not what may be.
        """
        try:
            if not stat.S_ISDIR(final.lstat().st_mode):
                raise ArtifactInvalid(f"{final} is no directory")
            try:
                encoded = read_plain(final / _MANIFEST, LARGEST_MANIFEST, afresh=afresh)
            except FileNotFoundError as error:
                final.lstat()
                raise ArtifactInvalid(f"{final} has no manifest") from error
            stated = Manifest.decode(encoded).payload
            try:
                payload = read_plain(final / _PAYLOAD, stated.size if stated else 0, afresh=afresh)
            except FileNotFoundError as error:
                final.lstat()
                raise ArtifactInvalid(f"{final} has a manifest and no payload") from error
        except OSError as error:
            if error.errno in _GONE:
                raise _Missing from None
            raise
        return _Found(encoded, payload)

    def _is_valid(self, final: Path) -> bool | None:
        try:
            self._verified(final)
        except _Torn:
            return False
        except _Missing:
            return None
        except ArtifactDistrusted:
            raise
        except ArtifactInvalid as error:
            raise StoreError(str(error)) from error
        return True


@dataclass(frozen=True)
class _Found:
    encoded: bytes
    payload: bytes


def _checked(
    final: Path, found: _Found, announced: str | None, judge: Callable[[Path, bytes], None]
) -> tuple[Manifest, dict[str, bytes], str]:
    stated = manifest_digest(found.encoded)
    if announced is not None and stated != announced:
        raise _Another(f"{final} is not the artifact that was announced")
    judge(final, found.encoded)
    manifest = Manifest.decode(found.encoded)
    if manifest.key.digest != final.name:
        raise ArtifactInvalid(f"{final} holds the artifact of another key")
    return manifest, unpack(manifest, found.payload), stated


class _Torn(Exception):
    """Read twice, and the same both times."""

    def __init__(self, why: ArtifactInvalid) -> None:
        super().__init__(str(why))
        self.why = why


class _Another(ArtifactInvalid):
    """It may well be whole."""


class _Missing(Exception):
    """There is no such artifact."""


def manifest_digest(encoded: bytes) -> str:
    """What READY announces."""
    return hashlib.sha256(encoded).hexdigest()
