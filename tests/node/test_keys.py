"""``kcoord keys``, and keys that verify and cannot sign."""

from __future__ import annotations

import hmac
import stat
from pathlib import Path

import msgpack
import pytest

from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.object import StoredObject
from kcoord.artifacts.signing import MANIFEST, VERIFIES_ONLY, Key, Trust, read_keys, split
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.packs.recipe_files import save_part
from kcoord.rank.client import Lead, Ready
from kcoord.settings import Settings
from kcoord.testing.stores import FILES, KEY, manifest_of
from tests.support.agents import Node, key_of, until
from tests.support.command import KCOORD, findings, kcoord
from tests.support.objects import parts_of
from tests.support.profiles import recipe
from tests.support.sandbox import Sandbox
from tests.support.signing import A


@pytest.fixture
def pair(sandbox: Sandbox) -> tuple[Path, Path]:
    """The files of a signer and of a verifier."""
    signer = sandbox.root / "signer"
    kcoord(sandbox, "keys", "new", str(signer), "--id", "ci")
    return signer, signer.with_name("signer.pub")


def trust_of(path: Path, **flags: str) -> Trust:
    return Trust.of(Settings.from_environ({}, signing_key_file=str(path), **flags))


# --- the command ---


@pytest.mark.smoke
def test_a_new_key_signs_is_private_and_replaces_nothing(sandbox: Sandbox) -> None:
    path = sandbox.root / "keys"
    said = kcoord(sandbox, "keys", "new", str(path)).stdout
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (key,) = read_keys(path).values()
    assert key.private is not None
    assert key.private.hex() not in said
    before = path.read_bytes()
    assert "is there: name another file" in kcoord(sandbox, "keys", "new", str(path), code=1).stderr
    assert path.read_bytes() == before
    assert sorted(p.name for p in sandbox.root.iterdir() if "keys" in p.name) == ["keys", "keys.pub"], (
        "nothing is left beside it"
    )


def test_a_pair_is_two_private_files_of_which_neither_is_replaced(sandbox: Sandbox, pair: tuple[Path, Path]) -> None:
    signer, verifier = pair
    assert [stat.S_IMODE(path.stat().st_mode) for path in pair] == [0o600, 0o600]
    private = signer.read_text().split()[1]
    assert private not in verifier.read_text()
    assert private not in repr(trust_of(signer))
    told = [each["finding"] for each in findings(sandbox, KCOORD_SIGNING_KEY_FILE=str(verifier))]
    assert "require: the key ci verify, and none signs" in told
    signer.unlink()
    kcoord(sandbox, "keys", "new", str(signer), code=1)
    assert not signer.exists(), "its other half would be another key's"


def test_after_a_rotation_the_new_key_signs_and_what_the_old_one_signed_still_verifies(sandbox: Sandbox) -> None:
    path = sandbox.root / "keys"
    kcoord(sandbox, "keys", "new", str(path), "--id", "one")
    old = trust_of(path).seal(MANIFEST, b"text")
    said = kcoord(sandbox, "keys", "rotate", str(path), "--id", "two").stdout
    assert "kcoord export --all" in said
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    now = trust_of(path)
    assert (now.signer, list(now.keys)) == ("two", ["two", "one"])
    assert now.verifies(MANIFEST, old)
    assert [key.private is None for key in now.keys.values()] == [False, True], "the old private key is gone"
    verifier = trust_of(path.with_name("keys.pub"))
    assert (list(verifier.keys), verifier.signer) == (["two", "one"], "")
    assert verifier.verifies(MANIFEST, old)
    assert verifier.verifies(MANIFEST, now.seal(MANIFEST, b"text"))
    assert "has a key 'two'" in kcoord(sandbox, "keys", "rotate", str(path), "--id", "two", code=1).stderr


def test_a_rotation_keeps_other_signers_public_keys_and_refuses_a_file_that_only_verifies(
    sandbox: Sandbox, pair: tuple[Path, Path]
) -> None:
    signer, verifier = pair
    other = sandbox.root / "other"
    kcoord(sandbox, "keys", "new", str(other), "--id", "other")
    verifier.write_text(verifier.read_text() + other.with_name("other.pub").read_text())
    kcoord(sandbox, "keys", "rotate", str(signer), "--id", "new")
    assert list(read_keys(verifier)) == ["new", "ci", "other"]
    before = verifier.read_bytes()
    assert "only verify" in kcoord(sandbox, "keys", "rotate", str(verifier), code=1).stderr
    link = sandbox.root / "link"
    link.symlink_to(signer)
    assert "symbolic link" in kcoord(sandbox, "keys", "rotate", str(link), code=1).stderr
    assert verifier.read_bytes() == before


def test_without_cryptography_a_key_is_an_error_and_never_the_policy_off(
    sandbox: Sandbox, pair: tuple[Path, Path]
) -> None:
    (sandbox.root / "cryptography.py").write_text("raise ImportError('broken')")
    for path in pair:
        given = {"KCOORD_SIGNING_KEY_FILE": str(path), "PYTHONPATH": str(sandbox.root)}
        for command in (["agent"], ["exec", "--", "true"]):
            done = sandbox.run(*KCOORD, *command, **given)
            assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
            assert "line 1: signing keys need the package cryptography, which cannot be imported: broken" in done.stderr
        done = sandbox.run("-m", "kcoord.agent", "--fd", "0", **given)
        assert done.returncode == 2, done.stderr


def test_cryptography_is_imported_with_a_key_only(sandbox: Sandbox, pair: tuple[Path, Path]) -> None:
    program = """
import sys
from kcoord.agent.__main__ import main
from kcoord.artifacts.signing import Trust
from kcoord.settings import Settings
Trust.of(Settings.from_environ())
print("cryptography" in sys.modules)
"""
    for given, imported in (({}, "False"), ({"KCOORD_SIGNING_KEY_FILE": str(pair[1])}, "True")):
        assert sandbox.run("-c", program, **given).stdout.strip() == imported


# --- a node that verifies and cannot sign ---


def test_the_public_key_makes_no_signature(pair: tuple[Path, Path]) -> None:
    """Whoever breaks into a node has its file: as a secret of an HMAC, as a seed of a private key, or for another id."""
    verifier = trust_of(pair[1])
    (public,) = verifier.keys.values()
    forger = Key.of_seed(public.public)
    assert not verifier.verifies(MANIFEST, Trust("require", {"ci": forger}).seal(MANIFEST, b"evil"))
    assert not verifier.verifies(MANIFEST, Trust("require", {"other": forger}).seal(MANIFEST, b"evil"))
    mac = hmac.digest(public.public, b"kcoord signature 1\0manifest\0ci\0evil", "sha256")
    for signature in (mac, mac + mac):
        forged = b"kcoord-signed-1\n" + bytes(msgpack.packb(["ci", signature, b"evil"]))
        assert not verifies(verifier, forged)
    for size in (32, 64):
        forged = b"kcoord-signed-1\n" + bytes(msgpack.packb(["ci", b"\0" * size, b"evil"]))
        assert not verifies(verifier, forged)


def verifies(trust: Trust, forged: bytes) -> bool:
    try:
        return trust.verifies(MANIFEST, forged)
    except ArtifactInvalid:
        return False


def test_a_store_takes_nothing_from_a_node_that_must_verify_and_cannot_sign(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    signing = Store(tmp_path / "store", trust_of(pair[0]))
    signing.open()
    announced = signing.publish(manifest_of(), FILES)
    verifying = Store(tmp_path / "store", trust_of(pair[1]))
    verifying.open()
    assert verifying.reads_only is not None
    assert verifying.fetch(KEY.digest, announced) is not None
    with pytest.raises(StoreError, match=VERIFIES_ONLY):
        verifying.publish(manifest_of(), FILES)
    with pytest.raises(StoreError, match=VERIFIES_ONLY):
        verifying.publish_object(StoredObject(manifest_of(), manifest_of().encode(), b""))
    with pytest.raises(StoreError, match=VERIFIES_ONLY):
        save_part(tmp_path / "store" / "v2" / "profiles" / "p", [recipe(1)], trust=verifying.trust)
    assert Store(tmp_path / "store", trust_of(pair[1], trust="off")).reads_only is None, "others may use it unsigned"


def test_a_node_that_only_verifies_loads_what_is_signed_and_keeps_what_it_compiles(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    root = str(tmp_path / "store")
    with Node(store=root, signing_key_file=str(pair[0]), agent_timeout="10") as signing:
        signing.start()
        client = signing.client()
        lead = signing.claim(client, "k")
        assert isinstance(lead, Lead)
        assert signing.publish(client, lead, "k")
        home = Store(Path(root)).home(key_of("k").digest)
        until(home.exists)
    assert split(parts_of(home)[0])[1].key_id == "ci"  # type: ignore[union-attr]
    with Node(store=root, signing_key_file=str(pair[1]), agent_timeout="10") as verifying:
        verifying.start()
        assert isinstance(verifying.claim(verifying.client(), "k"), Ready)
        for name in ("own", "another"):
            client = verifying.client()
            lead = verifying.claim(client, name)
            assert isinstance(lead, Lead)
            assert verifying.publish(client, lead, name)
            assert isinstance(verifying.claim(verifying.client(), name), Ready), "for the ranks of this node"
        log = verifying.directory / "started.log"
        until(lambda: VERIFIES_ONLY in log.read_text())
        assert log.read_text().count(VERIFIES_ONLY) == 1
    stored = [Manifest.decode(parts_of(p)[0]).key.name for p in Path(root).glob("v2/objects/??/*")]
    assert stored == [key_of("k").name]


def test_a_key_file_may_hold_both_halves_of_different_keys(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    path = tmp_path / "both"
    path.write_text(pair[1].read_text() + f"team {A}\n")
    path.chmod(0o600)
    both = trust_of(path)
    assert both.signer == "team", "the first that can sign"
    assert both.verifies(MANIFEST, trust_of(pair[0]).seal(MANIFEST, b"text"))
    assert both.roles() == "team signs; ci verify, too"
