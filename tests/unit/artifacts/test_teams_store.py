"""A store of several users: a group, the setgid bit and umask 002 let each publish and collect; without them others only read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.sandbox import Sandbox

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
GROUP, ANN, BEN = 12300, 12301, 12302

_MEMBER = """
import json, os, sys
import kcoord.cli, kcoord.cli.gc, kcoord.cli.store, tests.support.artifacts
from pathlib import Path
from kcoord.artifacts.store import Store
from kcoord.errors import StoreError
from kcoord.testing.stores import manifest_of
from kcoord.keys import CacheKey
root, user, group, umask, *words = sys.argv[1:]
os.setgroups([int(group)]); os.setgid(int(user)); os.setuid(int(user)); os.umask(int(umask, 8))
if words[0] != "publish":
    sys.argv[1:] = words
    kcoord.cli.main()
store, name = Store(Path(root)), words[1]
store.open()
manifest = manifest_of({"k": name.encode()}, CacheKey.of("test", name))
try:
    store.publish(manifest, {"k": name.encode()})
except StoreError as error:
    sys.exit(str(error))
"""


class Team:
    """A store's directory with these modes; its members act with one umask."""

    def __init__(self, sandbox: Sandbox, mode: int, umask: str) -> None:
        self._sandbox, self._umask, self.root = sandbox, umask, sandbox.root / "store"
        sandbox.root.chmod(0o755)
        self.root.mkdir()
        os.chown(self.root, ANN, GROUP)
        self.root.chmod(mode)

    def do(self, user: int, *words: str) -> tuple[int, str, str]:
        arguments = (str(self.root), str(user), str(GROUP), self._umask, *words)
        done = self._sandbox.run("-c", _MEMBER, *arguments, KCOORD_STORE=str(self.root))
        return done.returncode, done.stdout, done.stderr


def test_each_of_a_team_publishes_reads_and_collects_what_others_made(sandbox: Sandbox) -> None:
    team = Team(sandbox, 0o2770, "002")
    for user, words in (
        (ANN, ("store", "init")),
        (ANN, ("publish", "a")),
        (BEN, ("publish", "b")),
        (BEN, ("publish", "a")),
    ):
        code, _, said = team.do(user, *words)
        assert code == 0, said
    made = [path for path in team.root.rglob("*") if path.is_dir()]
    assert {path.stat().st_gid for path in made} == {GROUP}
    code, told, said = team.do(BEN, "gc", "--max-size", "0", "--least-age", "0s", "--json")
    assert code == 0, said
    assert (len(json.loads(told)["removed"]), json.loads(told)["refused"]) == (2, 0)


@pytest.mark.parametrize(("mode", "umask"), [(0o2770, "022"), (0o770, "002")], ids=["another umask", "no setgid"])
def test_otherwise_the_first_user_alone_publishes(sandbox: Sandbox, mode: int, umask: str) -> None:
    team = Team(sandbox, mode, umask)
    assert [team.do(ANN, *words)[0] for words in (("store", "init"), ("publish", "a"))] == [0, 0]
    code, _, said = team.do(BEN, "publish", "b")
    assert code == 1
    assert "permission denied: let this user read and write it" in said


def test_the_page_says_how() -> None:
    page = (Path(__file__).parents[3] / "docs" / "torchrun.md").read_text()
    assert "install -d -m 2770 -g team /shared/kcoord" in page
    assert "umask 002" in page
