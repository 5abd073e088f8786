"""The store: the shared directory that carries artifacts between nodes and jobs.

An artifact is ``v1/objects/<ab>/<digest>/`` with two files, ``manifest.msgpack`` and ``payload.tar.zst``: three
inodes and one short sequential read, which is what NFS servers and quotas want. Only the agent comes here.

A final name is looked up only when this node has been told that it is there, or by the key's leader, while nobody
else publishes: an NFS client caches a missing name for up to a minute.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import tarfile
import uuid
from dataclasses import replace
from pathlib import Path

import msgpack
import zstandard

from kcoord.artifacts.manifest import Manifest, Payload, check_content
from kcoord.artifacts.publish import (
    rename_into_place,
    set_aside,
    staging_name,
    store_error,
    write_files,
)
from kcoord.errors import ArtifactInvalid, StoreError

FORMAT = 1
MARKER = "kcoord-store.msgpack"
_MANIFEST, _PAYLOAD = "manifest.msgpack", "payload.tar.zst"
_TAR_BLOCK = 512
_ZSTD_LEVEL = 3
_CHUNK = 1 << 20


class Store:
    """One store. Every method may block for as long as the file system does, and raises `StoreError`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._objects = root / "v1" / "objects"
        self._staging = root / "v1" / "staging"
        self._quarantine = root / "v1" / "quarantine"

    def open(self) -> str:
        """Create the store if it is new, and return its uuid. Safe to run from many nodes at once."""
        try:
            self._staging.mkdir(parents=True, exist_ok=True)
            self._objects.mkdir(exist_ok=True)
            marker = self.root / MARKER
            fresh = self._staging / f"{staging_name()}.marker"
            write_files(self._staging, {fresh.name: _marker()}, durable=True)
            try:
                os.link(fresh, marker)  # of many creators one wins, and nobody sees half a file
            except FileExistsError:
                pass
            finally:
                fresh.unlink()
            stated = msgpack.unpackb(marker.read_bytes())
        except OSError as error:
            raise store_error(error, self.root) from error
        except (ValueError, msgpack.exceptions.UnpackException) as error:
            raise StoreError(
                f"{self.root}: its {MARKER} cannot be read ({error}): point KCOORD_STORE elsewhere"
            ) from error
        if not isinstance(stated, dict) or stated.get("format") != FORMAT or not isinstance(stated.get("uuid"), str):
            raise StoreError(
                f"{self.root}: its format is not {FORMAT}: use the kcoord that made it, or a new directory"
            )
        return str(stated["uuid"])

    def home(self, digest: str) -> Path:
        return self._objects / digest[:2] / digest

    def publish(self, manifest: Manifest, contents: dict[str, bytes]) -> str:
        """Publish an artifact; return the SHA-256 of the manifest that is in the store then (the winner's)."""
        payload = pack(manifest, contents)
        manifest = with_payload(manifest, payload)
        encoded = manifest.encode()
        staging = self._staging / staging_name()
        final = self.home(manifest.key.digest)
        try:
            staging.mkdir()
            write_files(staging, {_PAYLOAD: payload, _MANIFEST: encoded}, durable=True)
            won = rename_into_place(staging, final, _MANIFEST, self._is_valid, self._quarantine, durable=True)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise store_error(error, self.root) from error
        except StoreError:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        if won:
            return manifest_digest(encoded)
        try:
            return manifest_digest(self._read(final)[0])
        except (_Missing, ArtifactInvalid, OSError) as error:
            raise StoreError(f"{final}: another writer's artifact vanished: does something clean the store?") from error

    def fetch(self, digest: str, announced: str | None = None) -> tuple[Manifest, dict[str, bytes], str] | None:
        """The artifact's manifest, its checked contents, and its manifest's SHA-256; None if it is not there.

        `announced` is that SHA-256 as READY gave it: only that artifact will do. An artifact that is not whole is
        quarantined only by the leader (`announced` is None): *one* reader's failure takes nothing from the others.
        Raises `StoreError` if the file system fails, `ArtifactInvalid` if what is there does not verify.
        """
        final = self.home(digest)
        try:
            try:
                os.close(os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY))  # refreshes NFS's cached names
            except FileNotFoundError:
                return None
            encoded, payload = self._read(final)
            stated = manifest_digest(encoded)
            if announced is not None and stated != announced:
                raise ArtifactInvalid(f"{final} is not the artifact that was announced")
            manifest = Manifest.decode(encoded)
            if manifest.key.digest != digest:
                raise ArtifactInvalid(f"{final} holds the artifact of another key")
            contents = unpack(manifest, payload)
        except ArtifactInvalid:
            if announced is None:
                self._set_aside(final)
            raise
        except OSError as error:
            raise store_error(error, final) from error
        except _Missing:
            return None
        return manifest, contents, stated

    def manifests(self) -> list[Manifest]:
        """The manifests of all readable artifacts. Lists directories: for people, never on a job's way."""
        found = []
        try:
            for path in sorted(self._objects.glob(f"??/*/{_MANIFEST}")):
                try:
                    found.append(Manifest.decode(path.read_bytes()))
                except (ArtifactInvalid, FileNotFoundError):
                    continue
        except OSError as error:
            raise store_error(error, self.root) from error
        return found

    def _set_aside(self, final: Path) -> None:
        try:
            set_aside(final, self._quarantine)
        except OSError as error:
            raise store_error(error, self._quarantine) from error

    def _read(self, final: Path) -> tuple[bytes, bytes]:
        """Both files, or `_Missing`. ESTALE while reading means that somebody removed it: a miss too."""
        try:
            encoded = (final / _MANIFEST).read_bytes()
            try:
                payload = (final / _PAYLOAD).read_bytes()
            except FileNotFoundError as error:
                raise ArtifactInvalid(f"{final} has a manifest and no payload") from error
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                raise _Missing from None
            raise
        return encoded, payload

    def _is_valid(self, final: Path) -> bool:
        try:
            encoded, payload = self._read(final)
            manifest = Manifest.decode(encoded)
            unpack(manifest, payload)
        except (ArtifactInvalid, _Missing):
            return False
        return manifest.key.digest == final.name


class _Missing(Exception):
    """There is no such artifact."""


def _marker() -> bytes:
    return bytes(msgpack.packb({"format": FORMAT, "uuid": uuid.uuid4().hex}))


def manifest_digest(encoded: bytes) -> str:
    """What READY announces."""
    return hashlib.sha256(encoded).hexdigest()


def with_payload(manifest: Manifest, payload: bytes) -> Manifest:
    stated = Payload(len(payload), hashlib.sha256(payload).hexdigest())
    return replace(manifest, payload=stated)


def pack(manifest: Manifest, contents: dict[str, bytes]) -> bytes:
    """All files as one zstd-compressed tar; equal files give equal bytes (with one version of zstd)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in manifest.files:
            member = tarfile.TarInfo(entry.name)
            member.size, member.mode, member.mtime = entry.size, 0o644, 0
            tar.addfile(member, io.BytesIO(contents[entry.name]))
    return bytes(zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compress(buffer.getvalue()))


def unpack(manifest: Manifest, payload: bytes) -> dict[str, bytes]:
    """The checked contents of a payload. Raises `ArtifactInvalid`; memory stays within what the manifest states."""
    stated = manifest.payload
    if stated is None or len(payload) != stated.size or hashlib.sha256(payload).hexdigest() != stated.sha256:
        raise ArtifactInvalid(f"the payload of {manifest.key.name} is not the one that its manifest states")
    entries = {f.name: f for f in manifest.files}
    # every member: a header, perhaps an extended one of a few blocks, and its content in whole blocks
    most = sum(f.size + 16 * _TAR_BLOCK + 2 * len(f.name) for f in manifest.files) + 40 * _TAR_BLOCK
    contents: dict[str, bytes] = {}
    try:
        plain = _decompress(payload, most)
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as tar:
            for member in tar:
                entry = entries.get(member.name)
                plain_file = member.type == tarfile.REGTYPE and not member.issparse()
                if entry is None or not plain_file or member.name in contents or member.size != entry.size:
                    raise ArtifactInvalid(f"the payload holds {member.name!r}, which the manifest does not state")
                file = tar.extractfile(member)
                contents[member.name] = file.read() if file else b""
                check_content(entry, contents[member.name])
    except (tarfile.TarError, zstandard.ZstdError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise ArtifactInvalid(f"the payload of {manifest.key.name} cannot be unpacked: {error}") from error
    if contents.keys() != entries.keys():
        raise ArtifactInvalid(f"the payload lacks {', '.join(sorted(entries.keys() - contents.keys()))}")
    return contents


def _decompress(payload: bytes, most: int) -> bytes:
    with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(payload) as reader:
        plain = bytearray()
        while chunk := reader.read(min(_CHUNK, most + 1 - len(plain))):  # `read` allocates what it is asked for
            plain += chunk
    if len(plain) > most:
        raise ArtifactInvalid("the payload unpacks to more than its manifest states")
    return bytes(plain)
