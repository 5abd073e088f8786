"""Profiles: the recipes of what jobs compiled, in a directory of parts.

A profile is ``<store>/v2/profiles/<name>/``. Without a store or an agent, or while the store refuses writes, recipes go to
``<local_dir>/profiles/<name>/``, which is this node's alone. Each writer adds a *part*, one file that is renamed into place and
named after the set of its recipes, so that equal nodes write one file. A reader merges the newest `MOST_PARTS`, without a lock or
a wait; retention removes the others. So an agent's part holds what the agent read as its job began, besides what its ranks
record: parts converge, and in a job of a thousand nodes no kernel stays in an old part alone.

Untrusted: a part may be torn, another version's or another user's, and is checked like a frame from a stranger. Its recipes name
functions that are imported and called, so parts in the store are signed as artifacts are; a node's own parts are not.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgpack

from kcoord.artifacts.signing import OFF, PROFILE, VERIFIES_ONLY, Trust, split
from kcoord.errors import ArtifactInvalid, KcoordError, StoreError
from kcoord.files import beneath
from kcoord.files.atomic import LAYOUT, body_of, paths_of, save, with_check, written_at
from kcoord.files.faults import fault_of, store_error, store_errors
from kcoord.files.private import check_tier, make_own, make_private
from kcoord.files.reading import read_plain, unpack
from kcoord.ownership import is_ours
from kcoord.packs.automatic import is_automatic, nearest, superfluous
from kcoord.packs.recipe import MOST_RECIPES, Known, Recipe, add, merge
from kcoord.settings import Settings, is_profile_name
from kcoord.telemetry.events import Notices

MOST_PARTS = 64  # of a profile that are read
LARGEST_PART = 256 << 20  # bytes
HEAD = b"kcoord-profile-1\n"  # the first line of a part
_SUFFIX = ".recipes"
_LISTINGS = 5  # of a profile whose parts go while it is read
_VALUES = 32  # of a recipe on the wire, at most


def roots(store: Path | None, local_dir: Path) -> list[Path]:
    """The directories of profiles; the first is where new parts go, if it can be written."""
    return [*([store / LAYOUT / "profiles"] if store else []), local_dir / "profiles"]


def profile_names(settings: Settings) -> list[str]:
    """The names of all profiles. Raises `StoreError`. Blocks for as long as the file system does."""
    return sorted({name for root in _private_roots(settings) for name in profiles_in(root, follow_symlinks=True)})


def load_profile(settings: Settings, name: str, notices: Notices | None = None) -> list[Recipe]:
    """The recipes of all parts, each once, longest first; ties by order, then digest: the same for all who read the same parts.

    Skips, with a notice, parts that cannot be read or that the settings' `Trust` refuses. Raises `KcoordError`, which names the
    existing profiles, if there is no such profile. Blocks for as long as the file system does.
    """
    notices = Notices() if notices is None else notices
    name = nearest_of(_private_roots(settings), name)
    existing = profile_names(settings)  # lists the directory above, which refreshes the names that NFS remembers
    if name not in existing:
        there = f"are {', '.join(existing)}" if existing else "are none yet (KCOORD_PROFILE records one)"
        raise KcoordError(f"there is no profile {name!r}: there {there}")
    *shared, here = _private_roots(settings)
    found = [recipe for root in shared for recipe in parts(root / name, notices, Trust.of(settings))]
    merged = merge([*found, *parts(here / name, notices, OFF, settings.local_dir)])
    if not merged:
        raise KcoordError(f"the profile {name!r} has no part that can be read: record it again")
    return sorted(merged.values(), key=lambda r: (-r.seconds, r.order, r.digest))


def nearest_of(roots: Sequence[Path], name: str) -> str:
    """The profile below `roots` to read for `name`; `name` itself if there is none that is nearer. Raises `StoreError`."""
    if not is_automatic(name):
        return name
    times: dict[str, float] = {}
    for root in roots:
        for each, at in times_of_profiles(root).items():
            times[each] = max(at, times.get(each, at))
    return nearest(name, times) or name


def forget_superfluous(root: Path) -> None:
    """Remove the oldest of many automatic profiles below `root`, a directory of profiles or of packs, and their packs beside it.

    Nothing is removed through a link in the place of a store's directory. Raises OSError, `StoreError`.
    """
    # the user chose the store's root, or the local directory, and no link below it
    chosen = root.parents[1] if root.parent.name == LAYOUT else root.parent
    for name in superfluous(times_of_profiles(root)):
        beneath.remove(root / name, chosen)
        beneath.remove(root.parent / "packs" / name, chosen)


def parts(directory: Path, notices: Notices, trust: Trust = OFF, local_dir: Path | None = None) -> Collection[Recipe]:
    """The recipes of the newest parts in `directory`, each once. Skips, with a notice, unreadable ones and those `trust` refuses.

    `local_dir` is given if `directory` is one of a node's own: then so are those that another user may have written.
    """
    found: dict[str, Recipe] = {}  # however many parts hold a recipe, it is in memory once
    known = Known()

    try:
        if local_dir is not None:
            check_tier(directory)
        read: set[Path] = set()
        for _ in range(_LISTINGS):
            listed = newest_parts(directory)
            for path in [each for each in listed if each not in read]:
                with suppress(OSError):  # it is gone, as its reader finds
                    if local_dir is not None and not is_ours(uid := path.lstat().st_uid):
                        notices.tell(f"{path}: it belongs to user {uid}: a part of a profile is skipped")
                        read.add(path)
                        continue
                recipes = _read_part(path, notices, trust, known)
                read |= set() if recipes is None else {path}
                for recipe in recipes or ():
                    add(found, recipe)
            if read.issuperset(listed):
                break  # else a writer has replaced a part: its successor is in the next listing
    except StoreError as refused:
        notices.tell(f"{refused}; a profile is skipped", about=f"profiles in {directory.parent}")
    except OSError as error:
        fault = store_error(error, directory)
        notices.tell(f"a profile is skipped: {fault}", about=fault_of(directory.parents[2], fault))
    return found.values()


def newest_parts(directory: Path) -> list[Path]:
    """The parts that are read, the newest last. Raises OSError."""
    found = paths_of_parts(directory)
    if len(found) <= MOST_PARTS:
        return found
    return sorted(found, key=lambda path: (written_at(path), path.name))[-MOST_PARTS:]


def paths_of_parts(directory: Path) -> list[Path]:
    """All parts in `directory`, sorted; none if there is no such directory. Raises OSError."""
    return paths_of(directory, _SUFFIX)


def encode_part(recipes: dict[str, Recipe]) -> bytes:
    """The content of an unsigned part, of recipes by digest. Equal recipes give equal bytes."""
    items = [recipes[digest].to_wire() for digest in sorted(recipes)]
    return with_check(HEAD, bytes(msgpack.packb(items, unicode_errors="surrogatepass")))


def decode_part(content: bytes, known: Known | None = None) -> list[Recipe]:
    """The recipes of an unsigned part. Raises ValueError if it is torn or malformed. `known`: see `Known`."""
    known = Known() if known is None else known
    items = unpack(body_of(HEAD, content), 1 + MOST_RECIPES * _VALUES, unicode_errors="surrogatepass")
    if not isinstance(items, list) or len(items) > MOST_RECIPES:
        raise ValueError(f"it is not a list of at most {MOST_RECIPES} recipes")
    return [Recipe.from_wire(data, known) for data in items]


def save_part(
    directory: Path,
    recipes: Iterable[Recipe],
    earlier: Path | None = None,
    trust: Trust = OFF,
    local_dir: Path | None = None,
) -> Path:
    """Write `recipes` as one part, atomically and durably, signed if `trust` has a key that signs; returns its path.

    Removes `earlier`, the result of the same writer's last call, whose recipes must all be in `recipes`. `local_dir` is that of
    `parts`. Raises `StoreError`, also where signatures are required and no key signs.
    """
    if not trust.publishes:
        raise StoreError(f"{directory}: {VERIFIES_ONLY}", VERIFIES_ONLY)
    by_digest = merge(recipes)
    content = trust.seal(PROFILE, encode_part(by_digest))
    if len(content) > LARGEST_PART:
        raise StoreError(f"{directory}: a part of {len(content)} bytes is too large: record less under one name")
    if local_dir is not None:
        with store_errors(directory):
            make_own(directory)
    # equal writers write one file; the signer is in its name: a part of one key does not replace a part of another
    name = hashlib.sha256(" ".join([trust.signer, *sorted(by_digest)]).encode()).hexdigest()
    return save(directory, name + _SUFFIX, content, earlier)


def _private_roots(settings: Settings) -> list[Path]:
    """Raises `StoreError` if another user may have written to the local directory: its recipes must not be run."""
    found = roots(settings.store_root, settings.local_dir)
    make_private(settings.local_dir)
    check_tier(found[-1])
    return found


def _read_part(path: Path, notices: Notices, trust: Trust, known: Known) -> list[Recipe] | None:
    """None if the part is gone, empty if it is skipped."""
    try:
        sealed = read_plain(path, LARGEST_PART)
        doubt = trust.doubt(PROFILE, sealed)
        if doubt is None:
            return decode_part(split(sealed)[0], known)
        about = f"profile {path.parent.name}: {doubt.fault}"
        notices.tell(f"{doubt.of(path)}; a part of a profile is skipped", about=about)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):  # the latter on NFS v3
            return None
        notices.tell(f"a part of a profile is skipped: {store_error(error, path)}")
    except (ArtifactInvalid, ValueError) as error:
        notices.tell(f"{path}: a part of a profile is skipped: {error}")
    return []


def times_of_profiles(root: Path) -> dict[str, float]:
    """The profiles that have a directory in `root`, and when each got its last part. Raises `StoreError`."""
    found = {}
    for name in profiles_in(root):
        with suppress(OSError):
            found[name] = (root / name).stat().st_mtime
    return found


def profiles_in(root: Path, *, follow_symlinks: bool = False) -> list[str]:
    """The names of the profiles that have a directory in `root`, sorted; none if there is no `root`. Raises `StoreError`."""
    names: list[str] = []
    with store_errors(root), suppress(FileNotFoundError):
        names = [p.name for p in root.iterdir() if p.is_dir() and (follow_symlinks or not p.is_symlink())]
    return sorted(filter(is_profile_name, names))
