"""The store: the shared directory that carries artifacts between nodes and jobs.

An artifact is one file, ``v2/objects/<ab>/<digest>`` (`kcoord.artifacts.object`): one inode, and for a node one open and one
sequential read, which suits NFS servers and quotas. Of a job's processes only the agent uses it.

A final name is looked up only after its artifact was announced, or by the key's leader, while no other node publishes it: an NFS
client caches a missing name for up to a minute.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Protocol

from kcoord.artifacts.manifest import Contents, Manifest
from kcoord.artifacts.object import LARGEST_OBJECT, StoredObject, read_manifest, read_object, write_object
from kcoord.artifacts.signing import MANIFEST, OFF, VERIFIES_ONLY, Trust, split
from kcoord.artifacts.store_root import StoreRoot
from kcoord.errors import ArtifactDistrusted, ArtifactInvalid, ArtifactUnreadable, StoreError
from kcoord.files import beneath
from kcoord.files.atomic import LAYOUT
from kcoord.files.faults import store_error, store_errors
from kcoord.files.link import publish_file
from kcoord.files.reading import open_plain
from kcoord.files.rename import refresh_names, set_aside

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)  # the last on NFS, for a file that is removed while it is read
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Tell(Protocol):
    """`kcoord.telemetry.events.Notices.tell`."""

    def __call__(self, line: str, *, about: str | None = None) -> object: ...


class Store:
    """One store. Every method may block for as long as the file system does, and raises `StoreError`.

    `trust` verifies the signatures of artifacts that are read, and signs those that are published. ``tell(line, about=…)``
    receives the doubts that the policy only warns of. Without `creates`, `open` makes no store but a namespace's in another one.
    """

    def __init__(self, root: Path, trust: Trust = OFF, tell: Tell | None = None, *, creates: bool = True) -> None:
        self.root, self.trust, self._tell, self._creates = root, trust, tell, creates
        self._layout = StoreRoot(root)
        self.opened = False  # `open` has returned once
        self.uuid = ""  # from then on
        self._unwritable: StoreError | None = None  # the reason why `open` found a store that can only be read

    def open(self) -> str:
        """Create the store if it is new and may be, and return its uuid. Safe to run from many nodes at once.

        A store that can be read and not written is opened all the same: see `reads_only`. Where signatures are not required the
        user is told of a store that everybody may rearrange.
        """
        if not self._creates:
            self._layout.find()
        try:
            uuid, self._unwritable = self._layout.create(), None
        except StoreError as error:
            if not os.path.isdir(self._layout.objects):  # noqa: PTH112 - it raises nothing where this user may not look
                raise
            uuid, self._unwritable = self._layout.uuid(), error
        self._check_access()
        self.uuid, self.opened = uuid, True
        return uuid

    @property
    def reads_only(self) -> StoreError | None:
        """The reason why this process publishes nothing here, though it reads; None if it publishes."""
        return self._unwritable if self.trust.publishes else self._signs_nothing()

    def _signs_nothing(self) -> StoreError:
        return StoreError(f"{self.root}: {VERIFIES_ONLY}", VERIFIES_ONLY)

    def check(self) -> None:
        """Publish a probe. Makes no store. Raises `StoreError`."""
        if not self.trust.publishes:
            raise self._signs_nothing()
        self._layout.check()
        self._unwritable = None

    def _check_access(self) -> None:
        with store_errors(self.root):
            found = open_to_all(self.root)
        if self._tell is not None and not self.trust.required:
            for path in found:
                self._tell(f"{path}: {OPEN_TO_ALL}: {CLOSE_IT}", about=f"access to {path}")

    def home(self, digest: str) -> Path:
        return self._layout.objects / digest[:2] / digest

    def publish(self, manifest: Manifest, contents: Contents) -> str:
        """Publish an artifact, signed if there is a key; return the SHA-256 of the manifest (the winner's) in the store.

        `contents` are verified already, or opened one by one, and verified as they are sent. Where there is a key, the caller has
        seen them compiled. Raises `ArtifactDistrusted` if an artifact is there that this node cannot judge, and `ArtifactInvalid`
        for files that are not those of the manifest.
        """
        if why := self.reads_only:
            raise why
        sealed = self.trust.seal(MANIFEST, replace(manifest, made_here=False).encode())
        return self._publish(manifest.key.digest, sealed, lambda file: write_object(file, manifest, sealed, contents))

    def publish_object(self, artifact: StoredObject) -> str:
        """As `publish`, of an object that was read elsewhere, which the caller has verified."""
        if self.trust.required and split(artifact.encoded)[1] is None:
            raise self._signs_nothing()
        digest = artifact.manifest.key.digest
        return self._publish(digest, artifact.encoded, lambda file: file.writelines(artifact.pieces()))

    def _publish(self, digest: str, encoded: bytes, write: Callable[[BinaryIO], object]) -> str:
        """``write(file)`` writes the object of the manifest `encoded`."""
        final, winners = self.home(digest), [manifest_digest(encoded)]

        def holds() -> bool:
            try:
                with store_errors(final):
                    found = self._looked_up(final)
            except _Torn:
                self._set_aside(final)
                return False
            except ArtifactDistrusted:
                raise
            except ArtifactInvalid as error:
                raise StoreError(str(error)) from error
            if found is not None:
                winners.append(manifest_digest(found[0].encoded))
            return found is not None

        publish_file(final, self.root, self._layout.staging, write, holds)
        return winners[-1]

    def fetch(self, digest: str, announced: str | None = None) -> tuple[Manifest, dict[str, bytes], str] | None:
        """The artifact's manifest, its checked contents, and the SHA-256 of its manifest; None if there is none.

        `announced` is that SHA-256 as READY gave it: any other artifact is refused. The bytes that are returned are the bytes
        that were verified. An artifact that does not verify is read once more, afresh. If it is the same then, the leader
        (`announced` is None) moves it into quarantine. Nothing is taken from other nodes for a read that fails, for one that
        changes from one time to the next, nor for a signature by a key that is unknown here.
        Raises `StoreError` if the file system fails, `ArtifactInvalid` if the artifact does not verify.
        """
        final = self.home(digest)
        with store_errors(final):
            try:
                found = self._looked_up(final, announced)
            except _Torn as error:
                if announced is None:
                    self._set_aside(final)
                raise error.why from error
        return None if found is None else (found[0].manifest, found[1], manifest_digest(found[0].encoded))

    def _set_aside(self, final: Path) -> None:
        with store_errors(self._layout.quarantine):
            set_aside(final, self._layout.quarantine, self.root)

    def object(self, digest: str, largest: int | None = None) -> StoredObject | None:
        """The artifact's object, verified; None if there is none. Nothing is quarantined.

        One that is larger than `largest` bytes is not read, and raises `ArtifactUnreadable`. Raises `StoreError` and
        `ArtifactInvalid` as `fetch` does.
        """
        final = self.home(digest)
        with store_errors(final):
            try:
                found = self._verified(final, None, largest)
            except _Torn as error:
                raise error.why from error
        return None if found is None else found[0]

    def trusted(self, place: Path, encoded: bytes, announced: str | None = None) -> Manifest:
        """The manifest of an object, here or read elsewhere, as `fetch` trusts it: it is the announced one, and its signature is
        judged. The name of `place` is the key's digest.

        Raises `ArtifactInvalid`.
        """
        if announced is not None and manifest_digest(encoded) != announced:
            raise _NotAnnounced(f"{place}: it is not the artifact that was announced")
        self._check_signature(place, encoded)
        manifest = Manifest.decode(encoded)
        if manifest.key.digest != place.name:
            raise ArtifactInvalid("it holds the artifact of another key")
        return replace(manifest, made_here=False)

    def touch(self, digest: str) -> None:
        """Tell retention that the artifact is in use. Raises nothing."""
        beneath.mark_used(self.home(digest), self.root)

    def manifest_bytes(self, digest: str) -> bytes | None:
        """The manifest as it is, not verified; None if it is missing. Raises `ArtifactInvalid` if it is no object."""
        final = self.home(digest)
        try:
            with open_plain(final, LARGEST_OBJECT) as file, _named(final):
                return read_manifest(file.read, os.fstat(file.fileno()).st_size)[0]
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise store_error(error, final) from error

    def readable_manifest(self, digest: str) -> Manifest | None:
        """For people: the manifest, not verified; None if it is missing or damaged. Raises `StoreError`."""
        with suppress(ArtifactInvalid):
            encoded = self.manifest_bytes(digest)
            return None if encoded is None else Manifest.decode(encoded)
        return None

    def stated(self, digest: str) -> tuple[Manifest, str] | None:
        """The manifest, trusted as `fetch` would, and its SHA-256; None if it is missing. The payload is not looked at.

        Raises `StoreError` and `ArtifactInvalid`.
        """
        encoded = self.manifest_bytes(digest)
        return None if encoded is None else (self.trusted(self.home(digest), encoded), manifest_digest(encoded))

    def objects(self) -> Iterator[tuple[Path, os.stat_result]]:
        """All artifacts' files with their status, one bucket after the other. Lists directories: never on a job's way.

        Raises OSError.
        """
        with os.scandir(self._layout.objects) as buckets:
            names = sorted(each.name for each in buckets if len(each.name) == 2)
        for name in names:
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._layout.objects / name) as entries:
                for entry in entries:
                    if _DIGEST.fullmatch(entry.name):
                        with suppress(FileNotFoundError):
                            found = entry.stat(follow_symlinks=False)
                            if stat.S_ISREG(found.st_mode):
                                yield Path(entry.path), found

    def digests(self) -> Iterator[str]:
        """The digests of all artifacts. Lists directories, as `objects` does. Raises `StoreError`."""
        with store_errors(self.root):
            yield from (path.name for path, _ in self.objects())

    def manifests(self) -> list[Manifest]:
        """The manifests of all readable artifacts; none if there is no store yet. Lists directories: never on a job's way."""
        digests = self.digests() if os.path.isdir(self._layout.objects) else ()  # noqa: PTH112
        return [found for digest in digests if (found := self.readable_manifest(digest)) is not None]

    def _refresh(self, bucket: Path) -> bool:
        """Make an NFS client forget that it saw a name in `bucket` missing, or `bucket` itself. False: there is no bucket."""
        try:
            refresh_names(bucket)
        except FileNotFoundError:
            refresh_names(self._layout.objects)
            with suppress(FileNotFoundError):
                refresh_names(bucket)
                return True
            return False
        return True

    def _looked_up(self, final: Path, announced: str | None = None) -> tuple[StoredObject, dict[str, bytes]] | None:
        """As `_verified`, and once more if it is missing, which an NFS client may only remember."""
        found = self._verified(final, announced)
        if found is None and self._refresh(final.parent):
            found = self._verified(final, announced)
        return found

    def _verified(
        self, final: Path, announced: str | None = None, largest: int | None = None
    ) -> tuple[StoredObject, dict[str, bytes]] | None:
        """The object and its contents; None if it is missing. Raises `_Torn` if it is not whole, `ArtifactInvalid` if this node
        cannot tell, and OSError.
        """
        seen = []
        for afresh in (False, True):
            if afresh:
                # an NFS client may remember the file that had the name before it was replaced
                self._refresh(final.parent)
            read: list[bytes] = []
            try:
                return self._read(final, announced, largest, afresh, read)
            except (_NotAnnounced, ArtifactUnreadable):
                raise
            except ArtifactInvalid as error:
                if isinstance(error, ArtifactDistrusted) and error.unknown_key:
                    raise
                seen.append((b"".join(read), error))
        (first, _), (second, why) = seen
        if first != second:
            raise ArtifactInvalid(f"{final} is read differently each time: check this node's memory, network and mount")
        raise _Torn(why)

    def _read(
        self, final: Path, announced: str | None, largest: int | None, afresh: bool, read: list[bytes]
    ) -> tuple[StoredObject, dict[str, bytes]] | None:
        """The artifact; None if it is missing. What was read is in `read`, also if it does not verify.

        The manifest is judged before anything that it states is obeyed: the payload of one that is not trusted is not unpacked.
        Raises `ArtifactInvalid`, and OSError. ESTALE while reading means that another node has removed the artifact: a miss, too.
        """

        def judge(encoded: bytes) -> Manifest:
            manifest = self.trusted(final, encoded, announced)
            if largest is not None and manifest.size > largest:
                raise ArtifactUnreadable(f"{final}: {manifest.size} bytes are more than {largest}")
            return manifest

        try:
            with open_plain(final, LARGEST_OBJECT, afresh=afresh) as file, _named(final):

                def noted(size: int) -> bytes:
                    read.append(file.read(size))
                    return read[-1]

                found = read_object(noted, os.fstat(file.fileno()).st_size, judge)
                return found, found.contents()
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise

    def _check_signature(self, final: Path, encoded: bytes) -> None:
        """Raises `ArtifactInvalid` if a trusted signature is required, and missing."""
        doubt = self.trust.doubt(MANIFEST, encoded)
        if doubt is not None:
            raise doubt.of(final)


@contextmanager
def _named(place: Path) -> Iterator[None]:
    """Put `place` before the message of an `ArtifactInvalid` that says how an object is damaged."""
    try:
        yield
    except ArtifactInvalid as error:
        if type(error) is ArtifactInvalid:
            raise ArtifactInvalid(f"{place}: {error}") from error
        raise


class _Torn(Exception):
    """The artifact does not verify, and was read twice with equal bytes."""

    def __init__(self, why: ArtifactInvalid) -> None:
        super().__init__(str(why))
        self.why = why


class _NotAnnounced(ArtifactInvalid):
    """Another artifact than the announced one. It may be whole."""


OPEN_TO_ALL = "everybody may rename what is in it, and choose the code that ranks load, unless KCOORD_TRUST=require"
CLOSE_IT = "chmod o-w (or +t, if everybody is to use it)"


def open_to_all(root: Path) -> list[Path]:
    """The upper directories of the store at `root`, and of the store that its namespace is in, that everybody may rearrange.

    Not looked at: owners, groups, access control lists, and file system exports. Raises OSError if there is no such store.
    """
    places = [root, root / LAYOUT, root / LAYOUT / "objects"]
    if root.parent.name == "namespaces":
        places = [root.parent.parent, root.parent, *places]
    return [path for path in places if path.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH]


def manifest_digest(encoded: bytes) -> str:
    """The SHA-256 of an object's manifest, which READY announces."""
    return hashlib.sha256(encoded).hexdigest()
