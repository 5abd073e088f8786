"""What files say of the GPU that they are for: read from what real compilers write, and believed rather than the key."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kcoord
from kcoord.artifacts import local
from kcoord.artifacts.arch import contradiction, recorded_targets
from kcoord.artifacts.describe import describe
from kcoord.artifacts.manifest import Manifest, Origin
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, CompileFailed
from kcoord.keys.device import CPU, GPUTarget
from kcoord.rank.client import Failed
from kcoord.rank.coordinator import Compilation, Coordinator, Request
from kcoord.settings import Settings
from tests.support.sandbox import PROGRAMS, Sandbox

TARGET = kcoord.Scope.TARGET
SM80, SM90 = GPUTarget.parse("cuda:80"), GPUTarget.parse("cuda:90")

# --- what compilers write ---

_COMPILE = """
import pathlib, sys
import kernels
from triton.backends.compiler import GPUTarget
root = pathlib.Path(sys.argv[1])
for text in sys.argv[2:]:
    backend, arch = text.split(":")
    wide = backend == "hip" and arch.startswith("gfx9")
    target = GPUTarget(backend, int(arch) if backend == "cuda" else arch, 64 if wide else 32)
    kernel = kernels.build_scale(3, target=target)
    (root / text).mkdir()
    for name, content in kernel.asm.items():
        (root / text / f"scale.{name}").write_bytes(content if isinstance(content, bytes) else content.encode())
"""
_COMPILED = [
    "cuda:80", "cuda:90", "cuda:100", "cuda:120",
    "hip:gfx90a", "hip:gfx942", "hip:gfx950", "hip:gfx1100", "hip:gfx1200",
]  # fmt: skip


def compiled(root: Path, *targets: str) -> Path:
    """A directory with a real kernel's files for each of `targets`, compiled in a process of its own."""
    root.mkdir()
    variables = {**os.environ, "TRITON_CACHE_DIR": str(root / "cache"), "TRITON_DEFAULT_FP_FUSION": "1"}
    variables["PYTHONPATH"] = str(PROGRAMS)
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, root, *targets], env=variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("triton")
    return compiled(tmp_path_factory.mktemp("arch") / "kernels", *_COMPILED)


@pytest.mark.parametrize("target", _COMPILED)
def test_each_of_tritons_files_says_what_it_is_for_and_so_does_the_kernel(
    kernels: Path, tmp_path: Path, target: str
) -> None:
    assert recorded_targets(kernels / target) == (target,)
    said = {}
    for path in (kernels / target).iterdir():
        alone = tmp_path / path.suffix
        alone.mkdir()
        shutil.copy(path, alone)
        said[path.suffix] = recorded_targets(alone)
    code = {".ptx", ".cubin"} if target.startswith("cuda") else {".amdgcn", ".hsaco"}
    assert {suffix for suffix, targets in said.items() if targets == (target,)} == code
    assert set(said.values()) == {(target,), ()}


def test_an_artifact_for_several_gpus_is_for_each_of_its_machine_codes(kernels: Path, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    shutil.copy(kernels / "cuda:90" / "scale.cubin", tmp_path / "deep" / "one.bin")
    shutil.copy(kernels / "cuda:80" / "scale.cubin", tmp_path / "two.bin")
    shutil.copy(kernels / "cuda:100" / "scale.ptx", tmp_path)  # for GPUs that are newer than both
    shutil.copy(kernels / "hip:gfx942" / "scale.amdgcn", tmp_path)
    assert recorded_targets(tmp_path) == ("cuda:80", "cuda:90", "hip:gfx942")


def elf(machine: int, flags: int, version: int, width: int = 2, order: int = 1) -> bytes:
    header = struct.pack("<4sBBBBB7xHHIQQQI", b"\x7fELF", width, order, 1, 0x41, version, 1, machine, 1, 0, 0, 0, flags)
    return header.ljust(64, b"\0")


# e_flags as ptxas 12.8 (ABI 7 and 8), 12.9, 13.0, 13.4 and lld wrote them
@pytest.mark.parametrize(
    ("machine", "flags", "version", "target"),
    [
        (190, 0x4B054B, 7, "cuda:75"), (190, 0x500550, 7, "cuda:80"), (190, 0x5A0D5A, 7, "cuda:90"),
        (190, 0x900640A, 8, "cuda:100"), (190, 0x900780A, 8, "cuda:120"), (190, 0x9004B04, 8, "cuda:75"),
        (190, 0x9005A04, 8, "cuda:90"), (190, 0x9006702, 8, "cuda:103"), (190, 0x9007902, 8, "cuda:121"),
        (224, 0x53F, 3, "hip:gfx90a"), (224, 0x54C, 3, "hip:gfx942"), (224, 0x449, 3, "hip:gfx1250"),
    ],
)  # fmt: skip
def test_headers_of_older_and_newer_tools_are_read(
    tmp_path: Path, machine: int, flags: int, version: int, target: str
) -> None:
    (tmp_path / "code").write_bytes(elf(machine, flags, version))
    assert recorded_targets(tmp_path) == (target,)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("kernel.cubin", elf(190, 0x500550, 9)), ("kernel.cubin", elf(190, 0x500550, 7)[:20]), ("kernel.cubin", b"\x7fELF"),
        ("kernel.cubin", elf(190, 0x500550, 7, width=1)), ("kernel.cubin", elf(190, 0x500550, 7, order=2)),
        ("kernel.hsaco", elf(224, 0x05F, 3)), ("kernel.hsaco", elf(224, 0, 3)), ("kernel.hsaco", elf(224, 0x54C, 0)),
        ("host.so", elf(62, 0, 0)), ("kernel.ptx", b""),
        ("kernel.ptx", b"// .target sm_80\n.version 8.0\n"), ("kernel.ptx", b"\xff" * 99),
        ("kernel.amdgcn", b'\t.amdgcn_target "amdgcn-amd-amdhsa--gfx9-4-generic"\n'), ("notes.txt", b".target sm_80\n"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert recorded_targets(tmp_path) == ()


def test_an_ordinary_program_says_nothing(tmp_path: Path) -> None:
    shutil.copy(Path(sys.executable).resolve(), tmp_path / "python")
    assert recorded_targets(tmp_path) == ()


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["k.cubin", "k.ptx", "k.amdgcn"]), st.binary(max_size=99), st.integers(0, 63))
def test_altered_bytes_say_something_or_nothing_and_raise_nothing(name: str, content: bytes, start: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        base = bytearray(elf(190, 0x9005A04, 8))
        base[start : start + len(content)] = content
        Path(directory, name).write_bytes(bytes(base) if name == "k.cubin" else content)
        recorded_targets(Path(directory))


@pytest.mark.parametrize(
    ("text", "target"),
    [
        (b"//\n// Generated\n//\n\n.version 8.4\n.target sm_90a\n", "cuda:90"),
        (b".version 7.0\n.target sm_80, texmode_independent\n", "cuda:80"),
        (b".version 9.0\n  .target\tsm_100f // family\n", "cuda:100"),
    ],
)
def test_ptx_names_its_target_with_suffixes_and_modes(tmp_path: Path, text: bytes, target: str) -> None:
    (tmp_path / "kernel.ptx").write_bytes(text)
    assert recorded_targets(tmp_path) == (target,)


@pytest.mark.parametrize(
    "triple",
    ["amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-", "amdgcn-amd-amdhsa--gfx90a", "amdgpu9.0a-amd-amdhsa-unknown-gfx90a"],
)
def test_amd_assembly_names_its_processor_with_features_and_in_either_triple(tmp_path: Path, triple: str) -> None:
    (tmp_path / "kernel.amdgcn").write_text(f'\t.amdgcn_target "{triple}"\n\t.text\n')
    assert recorded_targets(tmp_path) == ("hip:gfx90a",)


def test_a_pipe_among_the_files_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kernel.cubin")
    (tmp_path / "kernel.ptx").symlink_to("/dev/zero")
    assert recorded_targets(tmp_path) == ()


@pytest.mark.parametrize(
    ("recorded", "target", "fits"),
    [
        (("cuda:90",), GPUTarget("cuda", 90, 32), True), (("cuda:90",), GPUTarget("cuda", "90a", 32), True),
        (("cuda:100",), GPUTarget("cuda", "100f", 32), True), (("cuda:90",), GPUTarget("cuda", "100f", 32), False),
        (("cuda:80",), GPUTarget("cuda", "90a", 32), False), (("cuda:103",), GPUTarget("cuda", "100f", 32), False),
        (("cuda:90",), GPUTarget("cuda", 80, 32), False), (("cuda:80", "cuda:90"), GPUTarget("cuda", 80, 32), True),
        (("hip:gfx942",), GPUTarget("hip", "gfx942:sramecc+:xnack-", 64), True),
        (("hip:gfx950",), GPUTarget("hip", "gfx942", 64), False),
        (("hip:gfx90a",), GPUTarget("hip", "gfx90c", 64), False), (("hip:gfx942",), GPUTarget("cuda", 90, 32), False),
        ((), GPUTarget("cuda", 90, 32), True), (("cuda:90",), None, True), (("cuda:90",), CPU.target, True),
    ],
)  # fmt: skip
def test_a_record_contradicts_another_gpu_and_nothing_else(
    recorded: tuple[str, ...], target: GPUTarget | None, fits: bool
) -> None:
    assert (contradiction(recorded, target) == "") is fits


# --- manifests ---


def test_a_manifest_says_what_its_files_say(tmp_path: Path) -> None:
    (tmp_path / "kernel.ptx").write_text(".target sm_90a\n")
    manifest = describe(tmp_path, key(), 1.0, Origin()).manifest
    assert manifest.targets == ("cuda:90",)
    assert Manifest.decode(manifest.encode()) == manifest


@pytest.mark.parametrize("targets", [None, "cuda:90", [1], [b"cuda:90"], {"cuda:90": 1}, ["x"] * 101])
def test_a_record_that_is_no_list_of_texts_is_refused(tmp_path: Path, targets: Any) -> None:
    (tmp_path / "kernel.bin").write_bytes(b"code")
    document = msgpack.unpackb(describe(tmp_path, key(), 1.0, Origin()).manifest.encode())
    document["targets"] = targets
    with pytest.raises(ArtifactInvalid):
        Manifest.decode(msgpack.packb(document))


# --- a rank ---


@pytest.fixture
def coordinator(sandbox: Sandbox) -> Iterator[Coordinator]:
    made = Coordinator(Settings.from_environ({"KCOORD_LOCAL_DIR": str(sandbox.local)}))
    yield made
    made.close()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device is an sm_90."""
    cuda = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 0,
        get_device_capability=lambda n: (9, 0),
        get_device_properties=lambda n: SimpleNamespace(name=str(n)),
    )
    version = SimpleNamespace(cuda="13.0", hip=None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, version=version))


def key(n: int = 0) -> kcoord.CacheKey:
    return kcoord.CacheKey.of("test", f"kernel{n}", number=n)


def write(target: GPUTarget) -> Any:
    """A compile function that makes code for `target`, whatever it is asked for."""
    return lambda staging: (staging / "kernel.ptx").write_text(f".target sm_{target.arch}\n")


def refuse(staging: Path) -> None:
    raise AssertionError("it should not have been compiled")


def text_of(artifact: kcoord.Artifact) -> str:
    return (artifact.path / "kernel.ptx").read_text()


def quarantined(coordinator: Coordinator) -> list[str]:
    found = coordinator.settings.local_dir.glob("objects/*/.kcoord/quarantine/*/kernel.ptx")
    return [path.read_text() for path in found]


def told(coordinator: Coordinator) -> list[str]:
    return coordinator.notices.since(0)[0]


def plant(coordinator: Coordinator, key: kcoord.CacheKey, target: GPUTarget) -> Path:
    """What a compiler whose target was settled earlier left in the local tier."""
    home = coordinator.home(key.digest)
    staging = local.new_staging(home)
    write(target)(staging)
    local.publish_local(staging, home, key, 1.0, Origin())
    return home


@pytest.mark.usefixtures("gpu")
def test_code_for_another_gpu_than_the_current_one_is_an_error_and_is_not_published(coordinator: Coordinator) -> None:
    with pytest.raises(ArtifactInvalid, match=r"kernel0 was compiled for cuda:80, not for cuda:90: .*target="):
        coordinator.get_or_compile(key(), write(SM80), scope=TARGET)
    assert not list(coordinator.settings.local_dir.glob("objects/*/*/kernel.ptx"))
    assert not list(coordinator.settings.local_dir.glob("objects/*/.kcoord/staging/*"))
    other = Coordinator(coordinator.settings)
    with pytest.raises(CompileFailed, match="cuda:80, not for cuda:90"):
        other.get_or_compile(key(), refuse, scope=TARGET)
    other.close()


@pytest.mark.usefixtures("gpu")
def test_code_for_the_current_gpu_and_code_that_does_not_say_are_published(coordinator: Coordinator) -> None:
    assert coordinator.get_or_compile(key(0), write(SM90), scope=TARGET).manifest.targets == ("cuda:90",)
    silent = coordinator.get_or_compile(key(1), lambda s: (s / "kernel.bin").write_bytes(b"code"), scope=TARGET)
    assert silent.manifest.targets == ()


@pytest.mark.usefixtures("gpu")
def test_a_target_that_is_named_is_what_is_asked_for_and_part_of_the_key(coordinator: Coordinator) -> None:
    artifact = coordinator.get_or_compile(key(), write(SM80), scope=TARGET, target=SM80)
    assert text_of(artifact) == ".target sm_80\n"
    mine = coordinator.get_or_compile(key(), write(SM90), scope=TARGET)
    assert text_of(mine) == ".target sm_90\n"
    assert artifact.key.diff(mine.key)[0].name.startswith("target")


def test_a_machine_without_a_gpu_compiles_for_any(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    artifact = coordinator.get_or_compile(key(), write(SM90), scope=TARGET)
    assert artifact.manifest.targets == ("cuda:90",)


def test_what_a_frozen_compiler_left_in_the_local_tier_is_refused_set_aside_and_compiled_again(
    coordinator: Coordinator,
) -> None:
    home = plant(coordinator, key(), SM80)
    found = coordinator.request(Request(key(), home, target=SM90))
    assert isinstance(found, Compilation)
    write(SM90)(found.staging)
    assert text_of(found.publish()) == ".target sm_90\n"
    assert quarantined(coordinator) == [".target sm_80\n"]
    assert any("holds code for cuda:80, not for cuda:90; it is compiled again" in line for line in told(coordinator))
    again = coordinator.request(Request(key(), home, target=SM90))
    assert isinstance(again, kcoord.Artifact)


def test_a_reader_that_asks_for_no_target_or_for_what_is_there_loads_it(coordinator: Coordinator) -> None:
    home = plant(coordinator, key(), SM80)
    assert isinstance(coordinator.request(Request(key(), home)), kcoord.Artifact)
    assert isinstance(coordinator.request(Request(key(), home, target=SM80)), kcoord.Artifact)


def test_a_load_believes_the_manifest_and_reads_no_code(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = plant(coordinator, key(), SM80)
    monkeypatch.setattr("kcoord.rank.compilation.recorded_targets", refuse)
    monkeypatch.setattr("kcoord.artifacts.describe.RecordedTargets", refuse)
    assert coordinator.find(key(), home, SM80) is not None
    assert coordinator.find(key(), home, SM90) is None


def test_a_backend_keeps_what_it_compiled_for_another_gpu_and_the_others_compile_at_once(
    coordinator: Coordinator,
) -> None:
    home = coordinator.home(key().digest)
    found = coordinator.request(Request(key(), home, target=SM90))
    assert isinstance(found, Compilation)
    assert found.lead is not None
    write(SM80)(found.staging)
    artifact = found.publish()
    assert text_of(artifact) == ".target sm_80\n"
    assert artifact.path != home
    assert not home.exists()
    assert [line for line in told(coordinator) if "it is not shared" in line] == [
        "kernel0 was compiled for cuda:80, not for cuda:90: it is not shared"
    ]
    other = Coordinator(coordinator.settings)
    answer = other.request(Request(key(), home, target=SM90))
    assert isinstance(answer, Compilation)
    assert isinstance(answer.failed, Failed)
    assert "cuda:80, not for cuda:90" in answer.failed.log
    answer.give_up()
    other.close()
    coordinator.close()
    assert not artifact.path.exists()


def test_what_the_store_has_for_another_gpu_is_refused_here_and_left_there(sandbox: Sandbox) -> None:
    environment = {"KCOORD_LOCAL_DIR": str(sandbox.local), "KCOORD_STORE": str(sandbox.root / "store")}
    coordinator = Coordinator(Settings.from_environ(environment))
    store = Store(sandbox.root / "store")
    store.open()
    staged = sandbox.root / "staged"
    staged.mkdir()
    write(SM80)(staged)
    manifest = describe(staged, key(), 1.0, Origin()).manifest
    store.publish(manifest, {"kernel.ptx": (staged / "kernel.ptx").read_bytes()})
    try:
        home = coordinator.home(key().digest)
        found = coordinator.request(Request(key(), home, target=SM90))
        assert isinstance(found, Compilation)
        write(SM90)(found.staging)
        assert text_of(found.publish()) == ".target sm_90\n"
        assert isinstance(coordinator.request(Request(key(), home, target=SM90)), kcoord.Artifact)
        assert quarantined(coordinator) == [".target sm_80\n"]
        assert not any("vanished" in line for line in told(coordinator))
        fetched = store.fetch(key().digest)
        assert fetched is not None
        assert fetched[0].targets == ("cuda:80",)
    finally:
        coordinator.close()


def test_an_artifact_for_another_gpu_that_arrives_during_the_compile_does_not_win(coordinator: Coordinator) -> None:
    home = coordinator.home(key().digest)
    found = coordinator.request(Request(key(), home, target=SM90))
    assert isinstance(found, Compilation)
    plant(coordinator, key(), SM80)
    write(SM90)(found.staging)
    assert text_of(found.publish()) == ".target sm_90\n"
    assert quarantined(coordinator) == [".target sm_80\n"]


def test_real_code_of_a_frozen_compiler_is_refused(coordinator: Coordinator, kernels: Path) -> None:
    """Its key says gfx942, and the code object is for gfx950."""

    def frozen(staging: Path) -> None:
        shutil.copy(kernels / "hip:gfx950" / "scale.hsaco", staging)

    with pytest.raises(ArtifactInvalid, match="for hip:gfx950, not for hip:gfx942"):
        coordinator.get_or_compile(key(), frozen, scope=TARGET, target=GPUTarget.parse("hip:gfx942"))
