"""A writer of the store who has no signing key, and a job with ``KCOORD_TRUST=require``."""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

import pytest

from kcoord.artifacts.manifest import MANIFEST_NAME, Manifest
from kcoord.profiles.requested import RequestedArtifact, load_requested, requested_directory, save_requested
from tests.support.agents import until
from tests.support.command import KCOORD
from tests.support.sandbox import Sandbox
from tests.support.signing import OURS, opened
from tests.support.triton_ranks import hooked

# A wrong artifact.

MODULE = """
import json, sys, sysconfig
import triton.runtime.build as build
from triton.runtime.cache import _base32
text = sys.argv[1]
src = '#include <Python.h>\\nstatic struct PyModuleDef m = {PyModuleDef_HEAD_INIT, "one", "%s"};' % text
src += 'PyMODINIT_FUNC PyInit_one(void) { return PyModule_Create(&m); }'
asked, real = [], build.get_cache_manager
build.get_cache_manager = lambda key: asked.append(_base32(key)) or real(key)
built = build.compile_module_from_src(src, 'one')
print(json.dumps({"text": built.__doc__, "stock": asked[0], "path": built.__file__}))
"""
"""Builds a C module as Triton builds a launcher; prints its text, Triton's own key of it, and the file that was loaded."""

needs_c = pytest.mark.skipif(
    not (shutil.which("gcc") and (Path(sysconfig.get_path("include")) / "Python.h").exists()),
    reason="needs gcc and Python's headers, as Triton itself does on a GPU",
)


def module(sandbox: Sandbox, text: str, local: str, **more: str | None) -> dict[str, str]:
    done = sandbox.run("-c", MODULE, text, **hooked(sandbox, 0, local, **more))
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture
def job(sandbox: Sandbox) -> dict[str, str]:
    """The settings of a job that signs, and whose first run has left two modules, A and B, and a list of them in the store."""
    store = sandbox.root / "store"
    opened(store, OURS)
    settings = {"KCOORD_STORE": str(store), "KCOORD_PROFILE": "job", "KCOORD_SIGNING_KEY": OURS}
    for text in "AB":
        module(sandbox, text, "first", **settings)
    until(lambda: len(load_requested(requested_directory(store, "job"))) == 2)
    until(lambda: len(list(opened(store, OURS).digests())) == 2)
    return settings


def key_of_module(path: str) -> str:
    return Manifest.decode(Path(path).with_name(MANIFEST_NAME).read_bytes()).key.digest


@needs_c
def test_a_forged_list_of_needs_puts_no_signed_artifact_at_anothers_place(
    sandbox: Sandbox, job: dict[str, str]
) -> None:
    a, b = (module(sandbox, text, "first", **job) for text in "AB")
    directory = requested_directory(Path(job["KCOORD_STORE"]), "job")
    shutil.rmtree(directory)
    digest = key_of_module(a["path"])
    save_requested(directory, [RequestedArtifact(digest, f"triton/{b['stock']}")])
    fetched = sandbox.run(*KCOORD, "agent", "--prefetch", **hooked(sandbox, 0, "second", **job))
    assert "0 artifacts" in fetched.stderr
    assert not list((sandbox.root / "second" / "triton").glob("*/one*"))
    assert module(sandbox, "B", "second", KCOORD_SPAWN="0")["text"] == "B"


@needs_c
def test_an_honest_list_of_needs_brings_modules_that_are_loaded(sandbox: Sandbox, job: dict[str, str]) -> None:
    """Else the test above would show nothing."""
    fetched = sandbox.run(*KCOORD, "agent", "--prefetch", **hooked(sandbox, 0, "second", **job))
    assert "2 artifacts" in fetched.stderr, fetched.stderr
    there = sorted((sandbox.root / "second" / "triton").glob("*/one*"))
    found = module(sandbox, "B", "second", KCOORD_SPAWN="0")
    assert found["text"] == "B"
    assert sorted((sandbox.root / "second" / "triton").glob("*/one*")) == there
    assert Path(found["path"]) in there


@needs_c
def test_a_module_that_lies_under_tritons_own_key_is_not_loaded_unverified(sandbox: Sandbox) -> None:
    a, b = (module(sandbox, text, "first", KCOORD_SPAWN="0") for text in "AB")
    planted = sandbox.root / "second" / "triton" / b["stock"]
    planted.mkdir(parents=True)
    shutil.copy(a["path"], planted)
    (sandbox.root / "second").chmod(0o700)
    assert module(sandbox, "B", "second", KCOORD_SPAWN="0")["text"] == "B"
