"""Trust: what no key of ours has signed is not loaded, and nobody is harmed by a node that lacks a key."""

from __future__ import annotations

import contextlib
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.signing import MANIFEST, PACK, PROFILE, Trust, split
from kcoord.artifacts.store import Store, manifest_digest
from kcoord.artifacts.store import open_to_all as upper_directories_open_to_all
from kcoord.errors import ArtifactDistrusted, ArtifactInvalid, SettingsError
from kcoord.keys.cache_key import CacheKey
from kcoord.packs.recipe_files import load_profile, parts, save_part
from kcoord.protocol import messages
from kcoord.rank.client import Lead, Ready
from kcoord.replay.profile_access import readable
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from kcoord.testing.stores import FILES, KEY, OTHER_KEY, manifest_of, quarantined
from tests.support.agents import Node, key_of, lookup, offer, until
from tests.support.command import KCOORD
from tests.support.objects import parts_of, payload_of, put_together
from tests.support.profiles import recipe
from tests.support.sandbox import Sandbox
from tests.support.signing import OURS, THEIRS, A, B, opened, trust, unsigned


def key_file(path: Path, *keys: str) -> Path:
    path.write_text("# ours\n\n" + "".join(f"{k.replace(':', ' ')}\n" for k in keys))
    path.chmod(0o600)
    return path


def of(**flags: str) -> Trust:
    return Trust.of(Settings.from_environ({}, **flags))


# --- keys ---


@pytest.mark.smoke
def test_the_first_key_of_a_file_signs_and_all_verify(tmp_path: Path) -> None:
    old = of(signing_key=OURS)
    both = of(signing_key_file=str(key_file(tmp_path / "keys", "new:" + B, OURS)))
    sealed = both.seal(MANIFEST, b"text")
    assert split(sealed)[1].key_id == "new"  # type: ignore[union-attr]
    assert both.doubt(MANIFEST, sealed) is None
    assert both.doubt(MANIFEST, old.seal(MANIFEST, b"text")) is None
    doubt = old.doubt(MANIFEST, sealed)
    assert doubt is not None
    assert doubt.unknown_key


def test_a_secret_of_32_bytes_is_the_seed_of_a_key_and_is_shown_nowhere() -> None:
    """The first test vector of RFC 8032; `k8s/make-secrets.sh` writes such a secret."""
    seed = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"
    given = Settings.from_environ({"KCOORD_SIGNING_KEY": f"k:{seed}\n"})
    key = Trust.of(given).keys["k"]
    assert key.public.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert key.sign(b"").hex().startswith("e5564300c360ac729086e2cc806e828a")
    shown = repr(given) + repr(Trust.of(given)) + str(given.redacted())
    assert seed not in shown
    assert repr(bytes.fromhex(seed)) not in shown
    assert given.redacted()["signing_key"] == "k:***"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("k", "a key id and a key"), ("k:", "32 bytes in hex"), (f"k k:{A}", "key id"), ("k:abcd", "32 bytes in hex"),
        (f"k:{A}!", "32 bytes in hex"), (f"k:{A}aa", "32 bytes in hex"), (f"{'k' * 65}:{A}", "key id"),
        ("k:ed25519-public:AAAA", "32 bytes in hex"), (f"k:ed25519-private:{A}", "32 bytes in hex"),
    ],
)  # fmt: skip
def test_a_key_that_cannot_be_used_is_a_settings_error_without_the_secret(given: str, why: str) -> None:
    with pytest.raises(SettingsError, match=f"KCOORD_SIGNING_KEY.*{why}") as caught:
        of(signing_key=given)
    assert A not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "no key"), ("# nothing\n", "no key"), ("k", "line 1"), (f"k {A} x", "line 1"), (f"k {A}\nk {B}", "line 2.*twice"),
     ("\xff", "no key"), ("k 12", "line 1.*32 bytes")],
)  # fmt: skip
def test_a_key_file_that_cannot_be_used_is_a_settings_error_without_its_content(
    tmp_path: Path, text: str, why: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SettingsError, match=why) as caught:
        of(signing_key_file=str(path))
    assert "\n" not in str(caught.value)
    assert A not in str(caught.value)


def test_the_policy_is_require_with_a_key_and_off_without() -> None:
    assert of().policy == "off"
    assert of(signing_key=OURS).policy == "require"
    assert of(signing_key=OURS, trust="off").policy == "off"
    with pytest.raises(SettingsError, match="set KCOORD_SIGNING_KEY_FILE"):
        of(trust="require")
    with pytest.raises(SettingsError, match="require or off"):
        of(trust="warn")


# --- envelopes ---


def test_a_signature_is_for_one_kind_one_key_id_and_one_content() -> None:
    ours = trust(OURS, f"twin:{A}")
    sealed = ours.seal(MANIFEST, b"text")
    assert sealed == ours.seal(MANIFEST, b"text")
    assert ours.doubt(MANIFEST, sealed) is None
    renamed = sealed.replace(b"main", b"twin")  # another id for the same secret
    for kind, data in [
        (PROFILE, sealed),
        (PACK, sealed),
        (MANIFEST, renamed),
        (MANIFEST, sealed.replace(b"text", b"tExt")),
    ]:
        doubt = ours.doubt(kind, data)
        assert doubt is not None
        assert not doubt.unknown_key


def test_no_change_of_one_byte_passes() -> None:
    ours = trust(OURS)
    sealed = ours.seal(MANIFEST, b"text")
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= 1
        try:
            assert ours.doubt(MANIFEST, bytes(changed)) is not None
        except ArtifactInvalid:
            continue
    for length in range(len(sealed)):
        try:
            assert ours.doubt(MANIFEST, sealed[:length]) is not None
        except ArtifactInvalid:
            continue


def test_without_a_key_nothing_is_wrapped_and_with_off_nothing_is_doubted() -> None:
    assert Trust().seal(MANIFEST, b"text") == b"text"
    assert Trust().doubt(MANIFEST, b"anything") is None
    assert trust(OURS, policy="off").doubt(MANIFEST, trust(THEIRS).seal(MANIFEST, b"text")) is None


# --- the store ---


def altered_payload(home: Path) -> None:
    encoded, payload = parts_of(home)
    home.write_bytes(put_together(encoded, payload[::-1]))


def evil(home: Path, sign: Callable[[bytes], bytes]) -> None:
    """What an attacker who can write to the store would put there: whole, and other code."""
    contents = dict.fromkeys(FILES, b"evil")
    manifest = manifest_of(contents, _key_at(home))
    home.write_bytes(put_together(sign(manifest.encode()), payload_of(manifest, contents)))


def _key_at(home: Path) -> CacheKey:
    return Manifest.decode(parts_of(home)[0]).key


def altered_manifest(home: Path) -> None:
    """Other code under the old signature."""
    _, signature = split(parts_of(home)[0])
    assert signature is not None

    def under_the_old_signature(manifest: bytes) -> bytes:
        return b"kcoord-signed-1\n" + bytes(msgpack.packb([signature.key_id, signature.value, manifest]))

    evil(home, under_the_old_signature)


ATTACKS: dict[str, Callable[[Path], None]] = {
    "a payload that was altered": altered_payload,
    "a manifest that was altered": altered_manifest,
    "the signature taken away": unsigned,
    "other code without a signature": lambda home: evil(home, lambda manifest: manifest),
    "other code, signed with another secret for our key id": lambda home: evil(
        home, lambda manifest: trust(f"main:{B}").seal(MANIFEST, manifest)
    ),
    "other code, signed by us as a profile": lambda home: evil(home, lambda m: trust(OURS).seal(PROFILE, m)),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.smoke
def test_what_is_signed_is_fetched_by_all_who_have_the_key_and_by_all_who_do_not_ask(root: Path) -> None:
    announced = opened(root, OURS).publish(manifest_of(), FILES)
    for reader in (opened(root, OURS), opened(root, THEIRS, OURS), opened(root), opened(root, THEIRS, policy="off")):
        found = reader.fetch(KEY.digest, announced)
        assert found is not None
        assert found[1:] == (FILES, announced)
    assert [m.key for m in opened(root).manifests()] == [manifest_of().key]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_forged_artifact_is_refused_and_the_leader_puts_another_in_its_place(root: Path, attack: str) -> None:
    store = opened(root, OURS)
    store.publish(manifest_of(), FILES)
    home = store.home(KEY.digest)
    ATTACKS[attack](home)
    forged = parts_of(home)[0]
    with pytest.raises(ArtifactInvalid):
        store.fetch(KEY.digest, manifest_digest(forged))  # as an attacker on Redis would announce it
    assert quarantined(store) == [], "a reader takes nothing from the others"
    with pytest.raises(ArtifactInvalid):
        store.fetch(KEY.digest)
    assert len(quarantined(store)) == 1
    store.publish(manifest_of(), FILES)
    found = store.fetch(KEY.digest)
    assert found is not None
    assert found[1] == FILES


def test_a_signed_artifact_under_another_keys_name_is_refused(root: Path) -> None:
    store = opened(root, OURS)
    store.publish(manifest_of(), FILES)
    store.home(OTHER_KEY.digest).parent.mkdir(exist_ok=True)
    shutil.copy(store.home(KEY.digest), store.home(OTHER_KEY.digest))
    with pytest.raises(ArtifactInvalid, match="another key"):
        store.fetch(OTHER_KEY.digest)


def test_what_a_key_signed_that_is_not_known_here_stays_for_those_who_know_it(root: Path) -> None:
    theirs, ours = opened(root, THEIRS), opened(root, OURS)
    announced = theirs.publish(manifest_of(), FILES)
    for given in (announced, None):
        with pytest.raises(ArtifactDistrusted, match=r"key 'other'.*not known here: add that key") as caught:
            ours.fetch(KEY.digest, given)
        assert caught.value.unknown_key
    with pytest.raises(ArtifactDistrusted):
        ours.publish(manifest_of(host="again"), FILES)
    assert quarantined(ours) == []
    assert list((root / "v2" / "staging").iterdir()) == []
    assert theirs.fetch(KEY.digest, announced) is not None


# --- agents ---


@contextlib.contextmanager
def node(root: Path, *keys: str, tmp: Path, **flags: str) -> Iterator[Node]:
    """A node whose agent runs and has `keys`."""
    if keys:
        flags["signing_key_file"] = str(key_file(tmp / f"keys-{len(list(tmp.iterdir()))}", *keys))
    with Node(store=str(root), agent_timeout="10", **flags) as made:
        made.start()
        yield made


def compile_it(made: Node, name: str) -> None:
    """Its first rank leads, and what it publishes is in the store."""
    client = made.client()
    lead = made.claim(client, name)
    assert isinstance(lead, Lead)
    assert made.publish(client, lead, name)


def until_published(root: Path, name: str, *keys: str) -> None:
    store = Store(root, trust(*keys) if keys else Trust())

    def there() -> bool:
        with contextlib.suppress(ArtifactInvalid):
            return store.object(key_of(name).digest) is not None
        return False

    until(there)


def notices_of(made: Node) -> list[str]:
    return [str(line) for line in made.status()["notices"]]


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "found in the store"])
def test_a_node_that_lacks_a_key_compiles_for_itself_and_takes_nothing_from_the_others(
    root: Path, tmp_path: Path, announced: bool
) -> None:
    with node(root, THEIRS, tmp=tmp_path) as one, node(root, OURS, tmp=tmp_path) as stranger:
        for name in ("k", "l"):
            compile_it(one, name)
            until_published(root, name, THEIRS)
        until(lambda: len(outcomes(root)) == 2)
        if not announced:
            shutil.rmtree(root / "v2" / "leases")
        before = outcomes(root)
        client = stranger.client()
        leads = [stranger.claim(client, name) for name in ("k", "l")]
        assert [type(lead) for lead in leads] == [Lead, Lead]
        assert outcomes(root) == before, "what was announced to all is not for a stranger to revoke"
        with node(root, THEIRS, tmp=tmp_path) as late:  # while the stranger compiles: it holds nobody up
            assert isinstance(late.claim(late.client(), "k"), Ready)
            for lead, name in zip(leads, ("k", "l"), strict=True):
                assert stranger.publish(client, lead, name)
            until(lambda: any("stay on this node" in line for line in notices_of(stranger)))
            assert isinstance(late.claim(late.client(), "l"), Ready)
        told = [line for line in notices_of(stranger) if "'other'" in line]
        assert len(told) == 2, told  # that it compiles, and that it does not publish: each once, for two kernels
        assert all("add that key to KCOORD_SIGNING_KEY_FILE" in line for line in told)
        assert quarantined(Store(root)) == []
        assert not any("the store cannot be used" in line for line in notices_of(stranger))


def outcomes(root: Path) -> dict[str, bytes]:
    """What the lease files say of finished keys."""
    return {path.name: path.read_bytes() for path in (root / "v2" / "leases").glob("*/*.outcome")}


def test_a_choice_without_a_signature_is_made_again(root: Path, tmp_path: Path) -> None:
    with (
        node(root, tmp=tmp_path) as forger,
        node(root, OURS, tmp=tmp_path) as ours,
        node(root, OURS, tmp=tmp_path) as too,
    ):
        assert offer(forger.client(), key_of("c"), b"evil") == b"evil"
        assert lookup(ours.client(), key_of("c")) is None
        assert offer(ours.client(), key_of("c"), b"good") == b"good"
        assert lookup(too.client(), key_of("c")) == b"good"


def test_a_rank_gets_only_those_parts_of_a_profile_that_its_agent_has_verified(root: Path, tmp_path: Path) -> None:
    with node(root, OURS, tmp=tmp_path) as made:
        assert made.client().ask(messages.Record("p", [recipe(1).to_wire()]), messages.Done, start=False)
        directory = root / "v2" / "profiles" / "p"
        until(lambda: directory.exists() and list(parts(directory, Notices(), trust(OURS))))
        save_part(directory, [recipe(66)])
        save_part(directory, [recipe(67)], trust=trust(f"main:{B}"))
        here = {"socket": str(made.path), "local_dir": str(made.settings.local_dir)}
        rank = Settings.from_environ({}, **{**made.flags, "signing_key_file": "", **here})
        assert len(load_profile(rank, "p")) == 3, "as it would read them in the store"
        for policy in (None, "off", "require"):  # whatever a rank was told: it has no key, and its agent decides
            told = replace(rank, trust=policy)
            assert load_profile(readable(told, "p"), "p") == [recipe(1)]
        assert sum("a part of a profile is skipped" in line for line in notices_of(made)) == 2
    alone = Settings.from_environ({}, local_dir=str(tmp_path / "other"), store=str(root), trust="require", spawn="0")
    assert readable(alone, "p").store is None, "without an agent nothing vouches for what is there"


def test_a_process_that_sees_no_store_reads_a_profile_in_the_copy_of_its_agent(root: Path, tmp_path: Path) -> None:
    """As the containers beside a sidecar."""
    opened(root, policy="off")
    save_part(root / "v2" / "profiles" / "p", [recipe(1)])
    with node(root, tmp=tmp_path) as made:
        rank = Settings.from_environ({}, socket=str(made.path), local_dir=str(made.settings.local_dir))
        assert load_profile(readable(rank, "p"), "p") == [recipe(1)]


_LOOK = """
import os, pathlib
shown = repr(dict(os.environ)) + pathlib.Path("/proc/self/environ").read_text() + pathlib.Path("/proc/self/cmdline").read_text()
print("SIGNING" in shown, SECRET in shown, os.environ.get("KCOORD_TRUST"))
"""


def test_a_rank_of_torchrun_cannot_read_the_key_in_its_environment(sandbox: Sandbox) -> None:
    """For `kcoord exec`: `tests/attacks/test_job_script.py`."""
    pytest.importorskip("torch")
    script = sandbox.root / "look.py"
    script.write_text(_LOOK.replace("SECRET", repr(A)))
    keys = key_file(sandbox.root / "keys", OURS)
    command = ["-m", "kcoord_launch.torchrun", "--nproc-per-node", "1", str(script)]
    for given in ({"KCOORD_SIGNING_KEY": OURS}, {"KCOORD_SIGNING_KEY_FILE": str(keys)}):
        done = sandbox.run_forked(*command, KCOORD_STORE=str(sandbox.root / "store"), **given)
        assert done.returncode == 0, done.stderr
        assert "False False require" in done.stdout, done.stdout


def test_a_launcher_beside_a_sidecar_need_not_be_able_to_read_the_keys(sandbox: Sandbox) -> None:
    script = sandbox.root / "look.py"
    script.write_text(_LOOK.replace("SECRET", repr(A)))
    command = [*KCOORD, "exec", "--", "python3", str(script)]
    given = {"KCOORD_SPAWN": "0", "KCOORD_AGENT_TIMEOUT": "0.2", "KCOORD_SIGNING_KEY_FILE": "/nowhere/keys"}
    done = sandbox.run(*command, **given)
    assert done.returncode == 0, done.stderr
    assert "False False require" in done.stdout, done.stdout


_PROGRAM = """
import kcoord

@kcoord.compile_once(scope=kcoord.Scope.TARGET)
def build(n, *, staging):
    (staging / "kernel").write_bytes(b"%d" % n)

if __name__ == "__main__":
    import program, sys
    if "warm" in sys.argv:
        print(kcoord.warmup("p"))
    for n in range(3):
        program.build(n)
"""


def test_ranks_without_a_key_warm_up_a_signed_profile(sandbox: Sandbox) -> None:
    pytest.importorskip("torch")
    (sandbox.root / "program.py").write_text(_PROGRAM)
    given = {"KCOORD_STORE": str(sandbox.root / "store"), "PYTHONPATH": str(sandbox.root), "KCOORD_SIGNING_KEY": OURS}
    command = ["-m", "kcoord_launch.torchrun", "--nproc-per-node", "1", "--kcoord-profile", "p", "program.py"]
    done = sandbox.run_forked(*command, **given)
    assert "3 compiled" in done.stderr, done.stderr
    done = sandbox.run_forked(*command, "warm", **given, KCOORD_LOCAL_DIR=str(sandbox.local / "fresh"))
    assert done.stdout.startswith("0 compiled, 3 loaded"), done.stderr


# --- who may rearrange the store ---


def test_of_a_store_that_everybody_may_rearrange_the_user_is_told_unless_signatures_are_required(root: Path) -> None:
    opened(root, OURS).publish(manifest_of(), FILES)
    (root / "v2" / "objects").chmod(0o777)
    for policy, told in (("off", 1), ("require", 0)):
        notices = Notices()
        assert opened(root, OURS, policy=policy, notices=notices).fetch(KEY.digest) is not None
        assert [("everybody may rename" in line, "chmod o-w" in line) for line in notices.since(0)[0]] == [
            (True, True)
        ] * told
    (root / "v2" / "objects").chmod(0o1777)
    assert upper_directories_open_to_all(root) == []


# --- namespaces ---


def test_each_namespace_has_a_store_of_its_own(root: Path, tmp_path: Path) -> None:
    with node(root, tmp=tmp_path) as common, node(root, tmp=tmp_path, namespace="team") as team:
        compile_it(common, "k")
        compile_it(team, "k")
        below = root / "namespaces" / "team"
        until_published(root, "k")
        until_published(below, "k")
        assert (below / "kcoord-store.msgpack").read_bytes() != (root / "kcoord-store.msgpack").read_bytes()
        assert len(list(Store(below).digests())) == 1


def test_a_namespace_that_would_lead_out_of_the_store_is_refused() -> None:
    for name in ("..", ".", ".hidden", "a/b"):
        with pytest.raises(SettingsError, match="KCOORD_NAMESPACE"):
            Settings.from_environ({"KCOORD_NAMESPACE": name})


def test_the_upper_directories_of_a_namespace_are_looked_at_too(root: Path) -> None:
    below = root / "namespaces" / "team"
    opened(below)
    assert upper_directories_open_to_all(below) == []
    (root / "namespaces").chmod(0o777)
    assert upper_directories_open_to_all(below) == [root / "namespaces"]
    assert stat.S_IMODE(below.stat().st_mode) & 0o002 == 0
