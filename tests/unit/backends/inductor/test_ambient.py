"""Settings around a compile that torch's key leaves open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kcoord.backends.inductor import ambient
from kcoord.backends.inductor.adapter import InductorBackend
from kcoord.backends.inductor.request import UNIT, Entry


def digest() -> str:
    return InductorBackend().key(Entry(UNIT, "torchs-key")).digest


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    yield
    torch.set_num_threads(before)


@contextmanager
def no_mkldnn() -> Iterator[None]:
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(True)


@contextmanager
def precise() -> Iterator[None]:
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to another type": lambda: torch.autocast("cpu", dtype=torch.float16),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "default type": default_dtype,
    "default device": lambda: torch.device("meta"),
    "threads": threads,
    "mkldnn": no_mkldnn,
    "precision": precise,
    "the order of attentions": lambda: sdpa_kernel(
        [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION],
        set_priority=True,
    ),
}


def test_a_unit_is_traced_anew_under_another_setting() -> None:
    digests = [digest()]
    for setting in SETTINGS.values():
        with setting():
            digests.append(digest())
    assert len(set(digests)) == len(digests)
    assert digest() == digests[0]


def test_torch_too_finds_nothing_of_another_setting() -> None:
    """Its own caches answer before kcoord is asked. Threads decide how C++ is built, and not which operators there are."""
    tags = [ambient.tag()]
    for name in SETTINGS.keys() - {"threads"}:
        with SETTINGS[name](), ambient.tagged(), ambient.tagged():
            from torch.compiler import config

            assert config.cache_key_tag == ambient.tag()
            tags.append(ambient.tag())
    assert len(set(tags)) == len(tags)


def test_in_the_usual_state_torchs_keys_are_its_own() -> None:
    """So stock finds what ranks of kcoord have compiled."""
    assert ambient.tag() == ""
