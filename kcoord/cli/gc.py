"""``kcoord gc``: remove artifacts that nobody needs, from the store or from this node."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from kcoord.artifacts.signing import Trust
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import check_is_store
from kcoord.cli.options import ON_DISK, PROFILE, Parsed, needed_store, print_json, subcommand
from kcoord.cli.output import echo
from kcoord.errors import KcoordError
from kcoord.files.trash import GRACE
from kcoord.retention.limits import LEAST_AGE, Collected, Doomed, Limits
from kcoord.retention.local_collector import collect_local
from kcoord.retention.pins import Kept, add_kept, kept_by_pins, pin, pinned_profiles, unpin
from kcoord.retention.store_collector import collect
from kcoord.retention.tidying import Tidying
from kcoord.retention.withdrawal import made_with, withdraw
from kcoord.settings import Settings
from kcoord.telemetry.spans import plain_text
from kcoord.units import bytes_text, parse_bytes, parse_span, span_text

_SIZE, _TIME = Parsed("size", parse_bytes), Parsed("time", parse_span)


def _parse_key(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{12,64}", text):
        raise ValueError("give at least the key's first 12 digits, as 'kcoord ls' shows them")
    return text


def _parse_compiler(text: str) -> tuple[str, str]:
    name, separator, release = text.partition("==")
    if not (name and separator and release):
        raise ValueError("give NAME==RELEASE, such as gcc==12.2.0, triton==3.7.1")
    return name, release


_KEY, _COMPILER = Parsed("key", _parse_key), Parsed("compiler", _parse_compiler)


@subcommand("gc", *ON_DISK)
@click.option("--max-size", type=_SIZE, help="Remove the least recently used until the rest fits: 50GiB.")
@click.option(
    "--max-files", type=click.IntRange(0), metavar="N", help="The same for the number of files and directories."
)
@click.option("--unused-for", type=_TIME, help="Remove those that no job has used for this long: 30d.")
@click.option("--least-age", type=_TIME, default=LEAST_AGE, help="Never remove younger artifacts. Default: 1h.")
@click.option(
    "--pin", "pins", type=PROFILE, multiple=True, help="Keep the artifacts that this profile's jobs asked for."
)
@click.option("--unpin", "unpins", type=PROFILE, multiple=True, help="Unpin a profile.")
@click.option("--pins", "list_pins", is_flag=True, help="List the pinned profiles.")
@click.option(
    "--key", "keys", type=_KEY, multiple=True, metavar="KEY",
    help="Withdraw the artifacts whose keys begin with these digits ('kcoord ls'): from the store, its packs, and this node.",
)  # fmt: skip
@click.option(
    "--toolchain",
    type=_KEY,
    metavar="DIGEST",
    help="Withdraw what the compilers of this toolchain have made ('kcoord toolchain ls').",
)
@click.option(
    "--compiler", "compilers", type=_COMPILER, multiple=True, metavar="NAME==RELEASE",
    help="Withdraw what this release of a compiler has made: gcc==12.2.0, triton==3.7.1.",
)  # fmt: skip
@click.option("--local", is_flag=True, help="This node's own copies instead of the store's artifacts.")
@click.option("--grace", type=_TIME, default=GRACE, help="The trash's grace period. Default: 15min.")
@click.option("--dry-run", is_flag=True, help="Show which artifacts would be removed, and why; write nothing.")
def command(
    settings: Settings, least_age: float, pins: tuple[str, ...], unpins: tuple[str, ...], list_pins: bool, local: bool,
    grace: float, dry_run: bool, as_json: bool, keys: tuple[str, ...], toolchain: str | None,
    compilers: tuple[tuple[str, str], ...], **limits: float | None,
) -> None:  # fmt: skip
    """Remove artifacts that nobody needs, while jobs run. Without a limit remove only the trash, files of killed processes, old
    time lines and old quarantine.

    Removed artifacts lie in the trash for the grace period. KCOORD_STORE_MAX_SIZE, KCOORD_STORE_MAX_FILES and
    KCOORD_STORE_UNUSED_FOR (with --local: KCOORD_LOCAL_MAX_SIZE) are the defaults of their options.

    After a miscompile, end the jobs, run it with --key, --toolchain or --compiler once, and with the same and --local on every
    other node.
    """
    given = {name: limit for name, limit in limits.items() if limit is not None}
    if keys or toolchain or compilers:
        if pins or unpins or list_pins or given:
            raise click.UsageError(
                "--key, --toolchain and --compiler remove artifacts whatever the limits and pins say: give them alone"
            )
        if toolchain or compilers:
            keys += tuple(_made_with(settings, toolchain, compilers))
        _withdraw(settings, keys, local, dry_run, as_json)
        return
    if pins or unpins or list_pins:
        if local or dry_run or given:
            raise click.UsageError(
                "--pin, --unpin and --pins are of the store, remove nothing, and are no dry run: give them alone"
            )
        _pin(needed_store(settings), Trust.of(settings), pins, unpins, as_json)
        return
    tidying = Tidying(grace=grace)
    if local:
        where = settings.local_dir
        if not where.is_dir():
            raise KcoordError(
                f"{where}: there is nothing on this node: set KCOORD_LOCAL_DIR to the directory of its jobs"
            )
        root = settings.store_root
        places = kept_by_pins(root, Trust.of(settings)).places if root else set()
        defaults: dict[str, Any] = {"max_size": settings.local_max_size}
        found = collect_local(
            where, Limits(**defaults | given, least_age=least_age), pinned=places, tidying=tidying, dry_run=dry_run
        )
    else:
        where = needed_store(settings, "; --local is for this node's own copies")
        check_is_store(where)
        trust = Trust.of(settings)
        defaults = {name: getattr(settings, f"store_{name}") for name in ("max_size", "max_files", "unused_for")}
        found = collect(
            where,
            Limits(**defaults | given, least_age=least_age),
            pinned=kept_by_pins(where, trust).names,
            trust=trust,
            tidying=tidying,
            dry_run=dry_run,
        )
    if as_json:
        print_json(_document(where, found, dry_run, grace))
    else:
        _print(where, found, dry_run, grace)
    if found.refused:
        raise KcoordError(
            f"this user may not remove {found.refused:,} of the artifacts that were to go: "
            "run 'kcoord gc' as a user who may rename the jobs' files"
        )


def _made_with(settings: Settings, toolchain: str | None, compilers: tuple[tuple[str, str], ...]) -> set[str]:
    """The keys of what these have made. The store has the records also for what is on this node."""
    root = settings.store_root
    found = made_with(Store(root, Trust.of(settings)) if root else None, settings.local_dir, toolchain, compilers)
    if not found:
        raise KcoordError("nothing here was made by that compiler: 'kcoord toolchain ls' lists toolchains of a store")
    return found


def _withdraw(settings: Settings, keys: tuple[str, ...], local: bool, dry_run: bool, as_json: bool) -> None:
    root = None if local else settings.store_root
    if root is not None:
        check_is_store(root)
    store = Store(root, Trust.of(settings)) if root is not None else None
    found = withdraw(keys, store, settings.local_dir, dry_run)
    if not (found.artifacts or found.packs or found.refused):
        raise KcoordError(f"nothing here has the key {', '.join(keys)}: 'kcoord ls' lists keys")
    if as_json:
        print_json({name: list(map(str, paths)) for name, paths in vars(found).items()} | {"dry_run": dry_run})
    else:
        for path in found.artifacts:
            echo(f"{'would remove' if dry_run else 'removed'} {plain_text(str(path))}")
        for path in found.packs:
            echo(f"{'would remove' if dry_run else 'removed'} {plain_text(str(path))}, a pack that holds it")
    if found.refused:
        raise KcoordError(
            f"this user may not remove {plain_text(str(found.refused[0]))}: "
            "run 'kcoord gc' as a user who may rename the jobs' files"
        )


def _pin(store: Path, trust: Trust, pins: tuple[str, ...], unpins: tuple[str, ...], as_json: bool) -> None:
    check_is_store(store)
    for name in unpins:
        if not unpin(store, name):
            raise KcoordError(f"the profile {name!r} is not pinned: 'kcoord gc --pins' lists those that are")
    for name in pins:
        if not _kept(store, name, trust):
            raise KcoordError(
                f"no job of the profile {name!r} has asked its agents for an artifact, and none asks for what its node has: "
                f"run one with KCOORD_PROFILE={name}, this store and an empty KCOORD_LOCAL_DIR"
            )
        pin(store, name)
    held = {name: _kept(store, name, trust) for name in pinned_profiles(store)}
    if as_json:
        print_json({"store": str(store), "pins": held})
        return
    for name, count in held.items():
        echo(f"{name}: {count:,} artifacts are kept")
    if not held:
        echo("no profile is pinned")


def _kept(store: Path, profile: str, trust: Trust) -> int:
    """The number of artifacts that a pin of `profile` keeps."""
    found = Kept()
    add_kept(found, store, profile, trust)
    return len(found.digests)


def _document(where: Path, found: Collected, dry_run: bool, grace: float) -> dict[str, Any]:
    return {
        "where": str(where),
        "dry_run": dry_run,
        "artifacts": found.artifacts,
        "bytes": found.size,
        "files": found.inodes,
        "pinned": found.pinned,
        "removed": [_doomed(d) for d in found.removed],
        "removed_bytes": found.removed_size,
        "refused": found.refused,
        "over": found.over,
        "tidied": found.tidied,
        "grace_seconds": grace,
    }


def _doomed(doomed: Doomed) -> dict[str, Any]:
    entry = doomed.entry
    return {
        "artifact": entry.name, "bytes": entry.size, "files": entry.inodes, "made": entry.made, "used": entry.used,
        "rule": doomed.rule, "why": doomed.why,
    }  # fmt: skip


def _print(where: Path, found: Collected, dry_run: bool, grace: float) -> None:
    for doomed in found.removed:
        name = doomed.entry.name[:12] if "/" not in doomed.entry.name else doomed.entry.name
        verb = "would remove" if dry_run else "removed"
        echo(f"{verb} {plain_text(name)}  {bytes_text(doomed.entry.size):>10}  {plain_text(doomed.why)}")
    for kind, number in found.tidied.items():
        echo(f"tidied up: {number:,} {kind}")
    if found.artifacts:
        kept, *_ = found.left
        pinned = f", {found.pinned:,} pinned" if found.pinned else ""
        echo(
            f"{where}: {kept:,} of {found.artifacts:,} artifacts stay{pinned}, "
            f"{bytes_text(found.size - found.removed_size)} of {bytes_text(found.size)} on disk"
        )
    else:
        echo(f"{where}: it has no artifacts")
    if found.removed and not dry_run:
        echo(
            f"{bytes_text(found.removed_size)} come free after {span_text(grace)}, by the next 'kcoord gc' or an agent"
        )
    if found.over:
        echo(f"kcoord: the limit is not kept: {found.over}", err=True)
