"""Two versions of kcoord on one node and one store: neither disturbs the other, and both use what either compiled."""

from __future__ import annotations

import json
import os

from kcoord.settings import PROTOCOL_VERSION
from tests.support.living import agents_of
from tests.support.sandbox import PROGRAMS, Sandbox, eventually


def test_versions_whose_protocols_differ_have_an_agent_each_and_share_the_store(sandbox: Sandbox) -> None:
    other = sandbox.root / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(
        f"import kcoord, kcoord.settings as s\ns.PROTOCOL_VERSION = {PROTOCOL_VERSION + 1}\nkcoord.__version__ = '99.0'\n"
    )
    store = {"KCOORD_STORE": str(sandbox.root / "store"), "KCOORD_STORE_CREATE": "1"}
    path = os.pathsep.join(filter(None, (str(other), os.environ.get("PYTHONPATH"))))
    script = str(PROGRAMS / "generic_rank.py")

    def compiled(node: str, **more: str) -> list[int]:
        done = sandbox.run(script, "2", "0.05", **store, KCOORD_LOCAL_DIR=str(sandbox.root / node), **more)
        assert (done.returncode, done.stderr) == (0, "")
        found: list[int] = json.loads(done.stdout)["compiled"]
        return found

    assert compiled("here") == [0, 1]
    eventually(lambda: len(list((sandbox.root / "store" / "v2" / "objects").glob("??/*"))) == 2)
    assert compiled("here", PYTHONPATH=path) == []
    assert compiled("there", PYTHONPATH=path) == []
    assert compiled("there") == []
    assert len(agents_of(sandbox.processes())) >= 2
