"""The GPU in the key of a library, on machines that are not this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcoord.backends.ninetoothed import request
from kcoord.errors import KeyFactorError

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's directory, on a machine with CUDA, in a process that has not initialized it."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.delenv("TRITON_DEFAULT_BACKEND", raising=False)
    return tmp_path


def add(driver: Path, number: int, model: str) -> None:
    (driver / str(number)).mkdir()
    (driver / str(number) / "information").write_text(f"Model: \t\t {model}\nIRQ: 5\n")


def test_equal_gpus_are_one_model_and_cuda_is_not_initialized(driver: Path) -> None:
    add(driver, 0, "NVIDIA H100")
    add(driver, 1, "NVIDIA H100")
    assert request.gpu(driver) == ({"models": ["NVIDIA H100"]}, None)


def test_gpus_of_two_models_are_no_factor(driver: Path) -> None:
    add(driver, 0, "NVIDIA H100")
    add(driver, 1, "NVIDIA A100")
    with pytest.raises(KeyFactorError, match="several models"):
        request.gpu(driver)


def test_a_gpu_that_the_driver_does_not_name_is_not_guessed(driver: Path) -> None:
    with pytest.raises(KeyFactorError, match="not known yet"):
        request.gpu(driver)
