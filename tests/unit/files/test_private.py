"""Directories that only this user may write to: which modes and owners, on the way to them, are refused."""

from __future__ import annotations

import grp
import os
import pwd
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from kcoord import ownership
from kcoord.errors import StoreError
from kcoord.files.private import check_tier, make_private
from kcoord.ownership import doubt_of

OTHER = 54321
CLONE_NEWUSER = 0x10000000

only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives directories away")


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_what_is_created_on_the_way_is_open_to_nobody_else_whatever_the_umask(tmp_path: Path) -> None:
    code = f"""
import os; from pathlib import Path; from kcoord.files.private import make_private
os.umask(0)
make_private(Path({str(tmp_path)!r}) / "a" / "b" / "c")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert [mode_of(tmp_path / path) for path in ("a", "a/b", "a/b/c")] == [0o755, 0o755, 0o700]


def test_a_cache_directory_that_does_not_exist_is_made_with_its_parents_for_this_user_alone_whatever_the_umask(
    tmp_path: Path,
) -> None:
    """Else the next process would find it below a directory that everybody may write to, and refuse it."""
    code = """
import os; os.umask(0)
from kcoord.settings import Settings
from kcoord.default_dir import why_unsuitable
place = Settings.from_environ().local_dir
print(place, why_unsuitable(place))
"""
    environ = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "a" / "b"), "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir(mode=0o700)
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() in (str(tmp_path / "a" / "b" / "kcoord"), f"{tmp_path}/tmp/kcoord-{os.getuid()}")
        if "tmp/kcoord" in done.stdout:
            pytest.skip("this disk is not chosen for a cache")
    assert [mode_of(tmp_path / path) for path in ("a", "a/b", "a/b/kcoord")] == [0o700] * 3


def test_a_place_that_never_exists_is_an_error_and_no_endless_attempt() -> None:
    with pytest.raises(StoreError):
        make_private(Path("/proc/nowhere/named"))


def test_a_link_is_refused_although_it_is_this_users_own(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for path in (tmp_path / "link", tmp_path / "dangling"):
        path.is_symlink() or path.symlink_to("nowhere")
        with pytest.raises(StoreError, match="symbolic link"):
            make_private(path)
    make_private(tmp_path / "link" / "below")  # nobody else can change that link
    assert (tmp_path / "real" / "below").is_dir()


def test_links_that_lead_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        doubt_of(tmp_path / "a" / "named")


def test_every_directory_that_a_chain_of_links_passes_is_looked_at(tmp_path: Path) -> None:
    """The last link is in a directory where everybody can exchange it."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "real" / "named").mkdir(parents=True)
    (tmp_path / "first").symlink_to("open/../open/second")
    (tmp_path / "open" / "second").symlink_to("../real")
    doubt = doubt_of(tmp_path / "first" / "named")
    assert doubt.endswith(f": everybody may replace it, by a rename in {tmp_path / 'open'}")
    (tmp_path / "open").chmod(0o1777)
    assert doubt_of(tmp_path / "first" / "named") == ""


@only_root
@pytest.mark.parametrize(
    ("name", "members", "trusted"),
    [("me", [], True), ("me", ["me"], True), ("me", ["you"], False), ("users", [], False)],
)
def test_the_group_of_this_user_alone_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, members: list[str], trusted: bool
) -> None:
    user = pwd.struct_passwd(("me", "x", os.getuid(), OTHER, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((name, "x", OTHER, members)))
    os.chown(tmp_path, -1, OTHER)
    tmp_path.chmod(0o775)
    assert (doubt_of(tmp_path) == "") == trusted


def test_users_of_an_access_control_list_are_others(tmp_path: Path) -> None:
    """`OTHER` may write, by a list as ``setfacl -m u:54321:rwx`` makes it; the mode alone says that the group may."""
    entries = ((1, 7, -1), (2, 7, OTHER), (4, 5, -1), (0x10, 7, -1), (0x20, 5, -1))
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    os.chown(tmp_path, -1, os.getgid())
    try:
        os.setxattr(tmp_path, "system.posix_acl_access", acl)
    except OSError as error:
        pytest.skip(f"the file system has no access control lists: {error}")
    assert "may write to it" in str(doubt_of(tmp_path))


@only_root
def test_one_who_is_not_mapped_may_own_what_is_above_if_nobody_else_may_write_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He is most likely the host's root; an open mount point of his may be anybody's."""
    (tmp_path / "named").mkdir(mode=0o700)
    os.chown(tmp_path, OTHER, OTHER)
    assert "may replace it" in str(doubt_of(tmp_path / "named"))
    monkeypatch.setattr(ownership, "_unmapped", lambda euid: OTHER)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == str(tmp_path))
    for mode in (0o755, 0o1777):
        tmp_path.chmod(mode)
        assert doubt_of(tmp_path / "named") == ""
    tmp_path.chmod(0o777)
    assert "everybody may replace it" in str(doubt_of(tmp_path / "named"))
    assert f"it belongs to user {OTHER}" in str(doubt_of(tmp_path))


@only_root
def test_in_a_user_namespace_the_hosts_root_is_trusted_above_and_nobody_else_is() -> None:
    """As in a rootless container: / and /tmp belong to a user whom it cannot name."""
    code = f"""
import ctypes, os; from kcoord.ownership import _finding_above, _unmapped, _way, doubt_of
os.setgroups([]); os.setgid({OTHER}); os.setuid({OTHER})
ctypes.CDLL(None).unshare({CLONE_NEWUSER})
uid = os.stat("/").st_uid
print(uid != 0, uid == _unmapped(os.geteuid()), doubt_of("/tmp/none") == "", _finding_above(_way("/tmp")) == "")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if done.stdout.startswith("False"):
        pytest.skip("no user namespaces here")
    assert done.stdout.split() == ["True", "True", "False", "True"], done.stderr
    assert ownership._unmapped(os.geteuid()) is None, "where it is mapped, it is a user"


def test_modes_count_below_a_private_directory_too(tmp_path: Path) -> None:
    make_private(tmp_path / "local")
    tier = tmp_path / "local" / "triton"
    tier.mkdir()
    tier.chmod(0o777)
    with pytest.raises(StoreError, match="everybody may write to it: empty it and chmod go-w"):
        check_tier(tier)


def test_a_link_out_of_the_local_directory_is_followed(tmp_path: Path) -> None:
    make_private(tmp_path / "local")
    (tmp_path / "large").mkdir()
    (tmp_path / "local" / "triton").symlink_to(tmp_path / "large")
    check_tier(tmp_path / "local" / "triton")
    (tmp_path / "large").chmod(0o777)
    with pytest.raises(StoreError, match="everybody may write to it"):
        check_tier(tmp_path / "local" / "triton")


def test_a_tier_is_created_where_another_user_could_be_first(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    check_tier(tmp_path / "cache" / "triton")
    assert mode_of(tmp_path / "cache" / "triton") == 0o755, "as its compiler would make it"
    (tmp_path / "mine").mkdir(mode=0o755)
    check_tier(tmp_path / "mine" / "triton")
    assert not (tmp_path / "mine" / "triton").exists(), "here nobody else can"
