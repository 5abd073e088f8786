"""Which saved tensors a compiled backward overwrites."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kcoord.backends.inductor import donation  # noqa: E402

CODE = """
    def call(self, args):
        s0, relu, view, relu_1, tangents_1 = args
        args.clear()
        buf0 = relu_1; del relu_1  # reuse
        extern_kernels.mm(view, reinterpret_tensor(relu, (4, 4), (4, 1), 0), out=buf0)
        buf1 = reinterpret_tensor(relu, (2, 8), (8, 1), 0); del relu  # reuse
        cpp_fused_0(buf1)
"""


@pytest.mark.parametrize(
    ("source", "donated", "taken"),
    [
        (CODE, [1, 2, 3], [1, 3]),
        (CODE, [2], []),
        (CODE.replace("# reuse", ""), [1, 2], []),
        (
            CODE.replace("# reuse", "").replace("cpp_fused_0", "in_out_ptr0"),
            [1, 2],
            [1, 2],
        ),  # it says so in another way
        (CODE.replace(", tangents_1 = args", ""), [1, 2], [1, 2]),
        ("        relu, = args\n        buf0 = relu; del relu  # reuse\n", [0], [0]),
        ("", [0, 5], [0, 5]),
    ],
)
def test_generated_code_names_the_tensors_whose_memory_it_takes(
    source: str, donated: list[int], taken: list[int]
) -> None:
    assert donation.overwritten(source, donated) == taken


@pytest.mark.parametrize("retains", [True, False])
def test_a_graph_that_is_retained_keeps_its_saved_tensors_and_another_one_gives_them_away(
    monkeypatch: pytest.MonkeyPatch, retains: bool
) -> None:
    def backward(args: list[Any]) -> list[Any]:
        assert args[0].stride() == (1, 8)  # generated code relies on it
        return [args[0].zero_()]

    monkeypatch.setattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: retains)
    saved = torch.ones(64)[:32].as_strided((4, 4), (1, 8))
    donation.spares(backward, [0])([saved])
    assert bool(saved.all()) is retains


def test_a_backward_that_is_not_compiled_yet_is_left_to_torch() -> None:
    def post_compile(spec: Any) -> Any:
        return spec

    later = SimpleNamespace(compiled_bw_func=None, fw_metadata=SimpleNamespace(bw_donated_idxs=[1]))
    assert donation.joined(post_compile, later) is later
