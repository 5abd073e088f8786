"""What happens in a round, drawn before it begins: keys, who asks for them in which order, and every fault.

A round is a function of the seed and its number, so that any round can be played again alone. Not reproducible is how the
processes run: the same fault may meet another moment of a compile.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace
from typing import Any

from tests.chaos.kinds import KINDS, LEASE_LIMIT, LEASE_TTL, RANKS, Kind

KEYS = 40
MODES = ("redis", "files", "node")
_MODE_WEIGHTS = (6, 3, 2)


@dataclass(frozen=True)
class Kernel:
    """A key, and what its compile is like: it takes `seconds`, and the round's first compile of it `hangs` seconds more.

    `spins`: it uses the CPU meanwhile, so that nobody can see that it hangs, if it does.
    """

    name: str
    seconds: float
    size: int
    hangs: float = 0.0
    spins: bool = False


@dataclass(frozen=True)
class Fault:
    """`at`: seconds after the first rank has begun. `node`, `rank`, `kernel`: indices, of which a kind ignores some."""

    number: int
    at: float
    kind: str
    node: int
    rank: int
    kernel: int
    seconds: float
    detail: str
    salt: int

    @property
    def row(self) -> Kind:
        return KINDS[self.kind]

    def __str__(self) -> str:
        hits = {
            "rank": f" rank {self.rank} of node {self.node}", "node": f" node {self.node}", "all": "",
            "key": f" kernel {self.kernel}" + (f" on node {self.node}" if self.kind == "artifact-on-node" else ""),
        }[self.row.hits]  # fmt: skip
        lasts = f" for {self.seconds:.2f} s" if self.seconds else ""
        return f"{self.at:6.2f} s  {self.kind}{' ' + self.detail if self.detail else ''}{hits}{lasts}"


@dataclass(frozen=True)
class Round:
    """`orders[node][rank]` is the order in which a rank asks for the kernels, in each of its two passes."""

    seed: str
    number: int
    mode: str
    launcher: str  # "exec": `kcoord exec` keeps the agent; "ranks": they start it
    kernels: tuple[Kernel, ...]
    orders: tuple[tuple[tuple[int, ...], ...], ...]
    faults: tuple[Fault, ...]
    leftovers: bool
    named: bool = (
        True  # KCOORD_LOCAL_DIR is set; else artifacts lie in the user's cache directory, sockets in the temporary one
    )
    lag: float = 0.0  # the second node starts so many seconds after the first, and finds much of it in the store

    @property
    def nodes(self) -> int:
        return len(self.orders)

    @property
    def name(self) -> str:
        """In every key of the round, so that a round is cold."""
        return f"{self.seed}.{self.number}"

    @property
    def bound(self) -> float:
        """Seconds within which the round must end on an idle machine: nothing in it runs in parallel, and each fault
        costs what it may."""
        work = sum(k.seconds + 0.1 for k in self.kernels)
        hangs = sum(min(k.hangs, LEASE_LIMIT) + k.hangs for k in self.kernels if k.hangs)
        return 15.0 + self.lag + work + hangs + sum(f.seconds + f.row.costs for f in self.faults)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Round:
        plain: dict[str, Any] = json.loads(text)
        plain["kernels"] = tuple(Kernel(**k) for k in plain["kernels"])
        plain["faults"] = tuple(Fault(**f) for f in plain["faults"])
        plain["orders"] = tuple(tuple(tuple(rank) for rank in node) for node in plain["orders"])
        return cls(**plain)


def draw(seed: str, number: int, modes: tuple[str, ...] = MODES) -> Round:
    """Round `number` of `seed`. With other `modes` it is another round."""
    dice = random.Random(f"{seed}/{number}")
    weights = [_MODE_WEIGHTS[MODES.index(m)] for m in modes]
    mode = dice.choices(modes, weights)[0]
    launcher = dice.choice(("exec", "exec", "ranks"))
    kernels = tuple(_kernel(dice, n) for n in range(KEYS))
    special, outlasts = dice.sample(range(KEYS), 2)
    if dice.random() < 0.4:
        runs_away = dice.random() < 0.5
        hangs = dice.uniform(10.0, 13.0) if runs_away else dice.uniform(2.0, 9.0)
        kernels = _with(kernels, special, hangs=hangs, spins=runs_away)
    if dice.random() < 0.3:  # it outlasts a lease that nobody renews, and not its limit
        kernels = _with(kernels, outlasts, seconds=dice.uniform(1.3, 1.5) * LEASE_TTL, spins=True)
    nodes = 1 if mode == "node" else 2
    orders, spread = _orders(dice, nodes)
    horizon = 0.5 + sum(k.seconds for k in kernels) / spread
    low, high = dice.choice(((1, 1), (1, 1), (2, 4), (2, 4), (2, 4), (5, 10), (5, 10), (15, 25)))
    kinds = [k for k in KINDS.values() if not k.needs or _has(mode, k.needs)]
    faults = sorted(
        (_fault(dice, kinds, nodes, horizon) for _ in range(dice.randint(low, high))), key=lambda drawn: drawn[0]
    )
    numbered = tuple(Fault(n, *drawn) for n, drawn in enumerate(faults))
    leftovers, lag = dice.random() < 0.3, dice.uniform(0.5, 5.0) if dice.random() < 0.3 else 0.0
    named = dice.random() < 0.5
    return Round(seed, number, mode, launcher, kernels, orders, numbered, leftovers, named, lag if nodes > 1 else 0.0)


def _has(mode: str, what: str) -> bool:
    return mode == "redis" or (mode == "files" and what == "store")


def _kernel(dice: random.Random, number: int) -> Kernel:
    return Kernel(f"k{number}", 0.005 * 100.0 ** dice.random(), dice.choice((300, 5_000, 200_000)))  # 5 to 500 ms


def _with(kernels: tuple[Kernel, ...], number: int, **other: Any) -> tuple[Kernel, ...]:
    return (*kernels[:number], replace(kernels[number], **other), *kernels[number + 1 :])


def _orders(dice: random.Random, nodes: int) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], int]:
    """As jobs do it: all ranks alike; nearly; or, as a warm-up does, each its own. And how many keys are compiled at once."""
    style = dice.choice(("alike", "alike", "nearly", "own"))
    common = list(range(KEYS))
    dice.shuffle(common)
    orders = []
    for _ in range(nodes):
        ranks = []
        for _ in range(RANKS):
            order = list(common)
            if style == "own":
                dice.shuffle(order)
            elif style == "nearly":
                order.sort(key=lambda n: common.index(n) + dice.uniform(0, 4))
            ranks.append(tuple(order))
        orders.append(tuple(ranks))
    return tuple(orders), {"alike": 1, "nearly": 2, "own": 4}[style]


def _fault(
    dice: random.Random, kinds: list[Kind], nodes: int, horizon: float
) -> tuple[float, str, int, int, int, float, str, int]:
    kind = dice.choices(kinds, [k.weight for k in kinds])[0]
    low, high = kind.lasts
    seconds = low + (high - low) * dice.random() ** 2  # the short ones are the many
    return (
        dice.uniform(0.0, horizon), kind.name, dice.randrange(nodes), dice.randrange(RANKS), dice.randrange(KEYS),
        seconds, dice.choice(kind.details), dice.getrandbits(32),
    )  # fmt: skip
