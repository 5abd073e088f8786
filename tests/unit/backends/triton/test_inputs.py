"""What hangs on Triton's objects for kcoord's sake disturbs nobody: copies, pickles, threads, imports."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from triton import knobs
from triton.runtime.driver import driver

from kcoord.backends.triton import adapter
from tests.stale.triton_surroundings import LIBRARY, LINKS
from tests.support.sandbox import PROGRAMS, Sandbox


@pytest.fixture
def scale(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel whose launches are watched."""
    monkeypatch.setenv("KCOORD_LOCAL_DIR", str(sandbox.local))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.syspath_prepend(str(PROGRAMS))
    sys.modules.pop("kernels", None)
    kernel = importlib.import_module("kernels").scale
    from kcoord.backends.triton.inputs import _Caches, count_changes

    for name in ("putenv", "unsetenv"):
        monkeypatch.setattr(os, name, getattr(os, name))  # put back at the end
    count_changes()
    kernel.device_caches = caches = _Caches(dict, {0: "kernels of device 0"})
    caches.watch(kernel)
    return kernel


def test_a_watched_function_has_its_kernels_as_ever(scale: Any) -> None:
    assert scale.device_caches[0] == "kernels of device 0"
    assert scale.device_caches[1] == {}, "and makes what is missing"


def test_a_change_drops_the_kernels_and_no_other_access_does(scale: Any) -> None:
    first = scale.device_caches
    assert first[0] == "kernels of device 0"
    os.environ["SOMETHING_ELSE"] = "1"
    assert 0 in first
    assert first[0] == "kernels of device 0"
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    try:
        assert first[0] == {}
    finally:
        del os.environ["TRITON_DISABLE_LINE_INFO"], os.environ["SOMETHING_ELSE"]


def test_a_knob_that_is_set_drops_the_kernels_and_so_does_the_end_of_its_scope(
    scale: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knobs, "propagate_env", False)
    caches = scale.device_caches
    with knobs.nvidia.scope():
        knobs.nvidia.disable_ptxas_opt = True
        assert caches[0] == {}
        caches[0] = "kernels of the knob"
        del knobs.nvidia.disable_ptxas_opt
        assert caches[0] == {}
        knobs.nvidia.disable_ptxas_opt = True
        assert caches[0] == {}
        caches[0] = "kernels of the knob"
    assert caches[0] == {}
    caches[0] = "kernels of device 0"
    knobs.autotuning.listener = None
    assert caches[0] == "kernels of device 0"


def test_an_exchanged_section_of_knobs_is_noticed_by_each_kernel(scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton's own tests exchange it."""
    from kcoord.backends.triton.inputs import _Caches, _process

    other = importlib.import_module("kernels").broken
    other.device_caches = _Caches(dict, {0: "kernels"})
    other.device_caches.watch(other)
    assert other.device_caches[0] == "kernels"
    monkeypatch.setattr(knobs, "nvidia", knobs.nvidia.copy())
    monkeypatch.setattr(knobs, "propagate_env", False)
    vars(knobs.nvidia)["disable_ptxas_opt"] = True
    _process.due = 0.0  # as after 50 ms
    assert scale.device_caches[0] == {}
    assert other.device_caches[0] == {}


class _Driver:
    """Of a device that has another target than the kernels, or of which it cannot tell."""

    def __init__(self, target: object) -> None:
        self.target = target

    def get_current_target(self) -> object:
        if isinstance(self.target, Exception):
            raise self.target
        return self.target


def test_kernels_of_another_target_are_dropped(scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", _Driver("sm_80"))
    scale.device_caches[0] = ({}, {}, "sm_80", "backend", "binder")
    assert scale.device_caches[0][2] == "sm_80"
    monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", _Driver("sm_90"))
    assert scale.device_caches[0] == {}


def test_a_driver_that_cannot_tell_its_target_fails_no_launch(scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = _Driver(RuntimeError("no device"))
    monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", broken)
    assert scale.device_caches[0] == "kernels of device 0"


def test_copies_and_pickles_are_plain_dictionaries(scale: Any) -> None:
    assert scale.device_caches[0]
    for made in (
        copy.copy(scale.device_caches),
        scale.device_caches.copy(),
        pickle.loads(pickle.dumps(scale.device_caches)),
        copy.deepcopy(scale.device_caches),
    ):
        assert type(made) is defaultdict
        assert made == {0: "kernels of device 0"}
    assert scale.device_caches | {1: 2} == {0: "kernels of device 0", 1: 2}


def test_what_is_known_of_a_function_does_not_travel_with_it(scale: Any) -> None:
    """Inductor's workers send functions to their parent."""
    assert scale._kcoord_inputs is not None
    assert pickle.loads(pickle.dumps(scale._kcoord_inputs)) is None
    assert copy.deepcopy(scale._kcoord_inputs) is None


def test_a_constexpr_global_is_watched_by_identity(scale: Any) -> None:
    """It is how Triton's constants are written: a launch must not encode it."""
    import triton.language as tl

    from kcoord.keys.function.watch import Watch

    watch, value = Watch(), tl.constexpr(3)
    watch.content(value, lambda: pytest.fail("encoded"))
    unchanged = watch.unchanged()
    assert unchanged()
    value.value = 4
    assert not unchanged()


_HOOKED = """
import sys, warnings
warnings.simplefilter("ignore")
import kcoord
kcoord.install()
{before}
import triton
from triton.compiler.compiler import ASTSource
print(hasattr(ASTSource.hash, "__kcoord_stock__"))
"""


@pytest.mark.parametrize("before", ["", "import triton.language", "kcoord.install()"])
def test_triton_is_hooked_when_it_is_imported_and_never_broken(sandbox: Sandbox, before: str) -> None:
    done = sandbox.run("-c", _HOOKED.format(before=before))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


def test_an_import_of_triton_that_fails_is_the_users_own_error(sandbox: Sandbox) -> None:
    broken = sandbox.root / "broken" / "triton"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('no such driver')\n")
    done = sandbox.run(
        "-c", _HOOKED.format(before=""), PYTHONPATH=f"{broken.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "RuntimeError: no such driver"


def test_a_kernel_whose_inputs_cannot_be_read_is_shared_with_nobody(
    scale: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under Triton's own key it could be stale."""
    from triton.compiler import ASTSource

    from kcoord.backends.triton import folding

    def fails(function: Any) -> Any:
        raise AttributeError("nobody foresaw this")

    for kind in (folding.ASTSource, folding.IRSource):
        monkeypatch.setattr(kind, "hash", kind.hash)  # put back at the end
    folding.hook()
    source = ASTSource(
        fn=scale, signature={"x": "*fp32", "y": "*fp32", "n": "i32"}, constexprs={"BLOCK": 1, "FACTOR": 2}
    )
    stock = ASTSource.hash.__kcoord_stock__(source)
    monkeypatch.setattr(folding, "inputs_of", fails)
    assert source.hash() == stock
    assert folding.true_text(f"key-{stock}-backend", source) is None


_EDITS = """
import kcoord
kcoord.install()
import importlib, sys
from tests.stale.triton_ways import WAYS
sys.path.insert(0, sys.argv[1])
print(WAYS["launch"]("launch(kernel, extern_libs=LIBRARIES)", vars(importlib.import_module("links"))))
"""
_EDITED_MEANWHILE = """
    import os
    if os.path.exists(LIBRARIES["mine"] + ".new"):
        os.replace(LIBRARIES["mine"] + ".new", LIBRARIES["mine"])
    return core"""


def test_a_library_that_is_replaced_in_the_middle_of_a_compile_makes_a_kernel_for_its_process_alone(
    sandbox: Sandbox,
) -> None:
    """It was hashed before, and linked after."""
    (sandbox.root / "links.py").write_text(LINKS.replace("\n    return core", _EDITED_MEANWHILE))
    library, root = sandbox.root / "mine.ll", str(Path(__file__).parents[4])

    def run(**variables: str) -> str:
        library.write_text(LIBRARY)
        done = sandbox.run("-c", _EDITS, str(sandbox.root), PYTHONPATH=root, TRITON_DISABLE_LINE_INFO="1", **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (sandbox.root / "mine.ll.new").write_text(LIBRARY.replace("%x, 1", "%x, 2"))
    other, served = run(), run()
    true = run(KCOORD_DISABLE="1", TRITON_CACHE_DIR=str(sandbox.root / "own"))
    assert other != true
    assert served == true


@pytest.mark.parametrize(
    ("backend", "keyed", "made", "target"),
    [("cuda", 90, "sm80", "cuda:80"), ("cuda", 90, "sm90", "cuda:90"), ("hip", "gfx942", "gfx950", "hip:gfx950")],
)
def test_a_kernel_is_for_the_architecture_that_its_options_state(
    backend: str, keyed: int | str, made: str, target: str
) -> None:
    """TRITON_OVERRIDE_ARCH chooses another one; the code says so, and would else be taken for another GPU's."""
    request = SimpleNamespace(
        triton_target=SimpleNamespace(backend=backend, arch=keyed, warp_size=32), options=SimpleNamespace(arch=made)
    )
    assert str(adapter.backend.target(request)) == target  # type: ignore[arg-type]
