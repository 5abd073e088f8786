"""The modules that a unit's or a graph's code is of, as people see them."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.command import KCOORD, as_json, kcoord
from tests.support.sandbox import Sandbox

pytest.importorskip("torch")

PROGRAM = """
import json
import kcoord
kcoord.install()
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 8, bias=False)
    def forward(self, x):
        return self.out(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 2, bias=False)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def product(x):
    return x @ x

torch.compile(Model())(torch.ones(2, 8)).sum().backward()
torch.compile(product)(torch.ones(2, 2))

from kcoord.backends.inductor.adapter import modules_of
seen = []
def see(graph, inputs):
    seen.append(modules_of(graph))
    return graph.forward
torch.compile(Model(), backend=aot_autograd(fw_compiler=see, bw_compiler=see))(torch.ones(2, 8)).sum().backward()
print(json.dumps(seen))
"""


def test_a_unit_is_listed_and_explained_by_the_modules_of_its_model(sandbox: Sandbox) -> None:
    """Without a C++ compiler: products of matrices need none."""
    program = sandbox.root / "model.py"
    program.write_text(PROGRAM)
    done = sandbox.run_kcoord(*KCOORD, "exec", "--job", "modules", "--", sys.executable, program, timeout=250)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["blocks.0.out to head", "head to blocks.0.out, backward"]
    units = {each["variant"]: each for each in as_json(sandbox, "ls")}
    line = PROGRAM.splitlines().index("    return x @ x") + 1
    assert units.keys() == {"blocks.0.out to head", f"product (model.py:{line})"}
    explained = as_json(sandbox, "explain", units["blocks.0.out to head"]["digest"])
    assert explained["factors"]["modules"] == "blocks.0.out to head"
    report = sandbox.root / "report.html"
    kcoord(sandbox, "report", "modules", "-o", str(report))
    assert "blocks.0.out to head" in report.read_text()
