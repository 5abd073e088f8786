"""The canonical form of NineToothed's sources."""

from __future__ import annotations

from kcoord.backends.ninetoothed.sources import canonical

KERNEL = """import triton
@triton.jit
def add(ninetoothed_tensor_{0}_pointer, ninetoothed_tensor_{1}_size_0, ninetoothed_BLOCK_SIZE_{2}: int):
    ninetoothed_tensor_{0}_pointer + one(ninetoothed_tensor_{1}_size_0)

def launch_add(ninetoothed_tensor_{0}):
    add[1](ninetoothed_tensor_{0})

"""
ONE = "@triton.jit\ndef one(x):\n    return x  # a comment\n"
TWO = "@triton.jit\ndef two(x):\n    return 2\n"


def test_names_are_numbered_in_their_order() -> None:
    assert canonical(KERNEL.format(1000000007, 1000000012, 1000000003)) == KERNEL.format(0, 1, 0)


def test_tensors_that_were_made_before_kcoord_was_installed_keep_names_of_their_own() -> None:
    assert canonical(KERNEL.format(0, 1000000000, 0)) == KERNEL.format(0, 1, 0)
    assert canonical(KERNEL.format(1000000000, 0, 0)) == KERNEL.format(1, 0, 0)


def test_functions_come_in_the_order_of_their_texts() -> None:
    kernel = KERNEL.format(0, 1, 0)
    assert canonical(f"{kernel}{TWO}\n{ONE}") == canonical(f"{kernel}{ONE}\n{TWO}") == f"{kernel}{ONE}{TWO}"


def test_a_canonical_source_stays_as_it_is() -> None:
    source = canonical(f"{KERNEL.format(5, 6, 7)}{TWO}\n{ONE}")
    assert canonical(source) == source
