"""The rooms of the house: imports go down, in no circles, and heavy packages stay out. `docs/development.md` draws it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLOORS = (
    ("__main__",),
    ("testing", "cli", "autoload"),
    ("kcoord_launch",),
    ("agent", "replay", "report"),
    ("backends", "retention"),
    ("rank", "leases"),
    ("packs", "protocol"),
    ("artifacts",),
    ("telemetry",),
    ("keys",),
    ("files",),
    (
        "cgroups",
        "default_dir",
        "errors",
        "interruption",
        "latest",
        "mounts",
        "ownership",
        "ranks",
        "redis_url",
        "secret_files",
        "setting_values",
        "settings",
        "stalls",
        "units",
    ),
)
"""A room imports rooms of lower floors only. The rooms of one floor do not know each other, but for the lowest."""

HEAVY = ("torch", "triton", "redis", "click", "rich", "msgpack", "numpy", "psutil", "zstandard", "prometheus_client")


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package in (ROOT / "kcoord", ROOT / "launch" / "kcoord_launch"):
        for path in package.rglob("*.py"):
            parts = path.relative_to(package.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text())


def room_of(module: str) -> str:
    """``agent`` of ``kcoord.agent.claims``; empty for ``kcoord`` itself, which holds the version and lazy names."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "kcoord" else package


@cache
def imports(module: str) -> frozenset[str]:
    """Every module that `module` imports, also within functions, and by ``import_module("…")``."""
    return frozenset(_imported(tree_of(module)))


def _imported(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.ImportFrom) and child.module:
            for name in child.names:
                inner = f"{child.module}.{name.name}"
                yield inner if inner in modules() else child.module
        elif isinstance(child, ast.Import):
            yield from (name.name for name in child.names)
        else:
            if isinstance(child, ast.Call) and ast.unparse(child.func).endswith("import_module"):
                yield from (each.value for each in child.args if isinstance(each, ast.Constant))
            yield from _imported(child)


def pairs() -> Iterator[tuple[str, str]]:
    """Every import within the house."""
    for module in modules():
        for other in imports(module):
            if other in modules() and other != "kcoord":
                yield module, other


def test_every_room_has_its_floor() -> None:
    known = {room for floor in FLOORS for room in floor}
    assert {room_of(module) for module in modules()} - {""} <= known


def test_imports_go_down() -> None:
    floor_of = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    lowest = len(FLOORS) - 1
    up = []
    for module, other in pairs():
        mine, theirs = room_of(module), room_of(other)
        if mine and mine != theirs and (floor_of[theirs], floor_of[mine]) != (lowest, lowest):
            up += [f"{module} imports {other}"] * (floor_of[theirs] <= floor_of[mine])
    assert not up


def test_no_modules_import_one_another_in_a_circle() -> None:
    """Nor by imports within functions, which would hide it."""
    graph = {module: {m for m in imports(module) if m in modules()} for module in modules()}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(" → ".join(error.args[1])) from None


def test_an_import_of_ours_within_a_function_has_a_reason_beside_it() -> None:
    """In the backends. Other rooms have some without."""
    bare = [
        f"{module}:{node.lineno}"
        for module in modules()
        if room_of(module) == "backends"
        for function in ast.walk(tree_of(module))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kcoord")
        if "  # " not in modules()[module].read_text().splitlines()[node.lineno - 1]
    ]
    assert not bare


def test_the_report_is_imported_by_the_cli_alone() -> None:
    assert {room_of(module) for module, other in pairs() if room_of(other) == "report"} <= {"report", "cli"}


def test_commands_write_lines_and_tables_without_control_characters() -> None:
    """Through `kcoord.cli.output` and `kcoord.cli.console`, whose texts a terminal does not obey."""
    texts = {name: path.read_text() for name, path in modules().items() if name.startswith("kcoord.cli.")}
    other = re.compile(r"click\.(secho|echo)\(|(?<![.\w])print\(|from rich\.console import .*Console")
    assert {name for name, text in texts.items() if other.search(text)} == {"kcoord.cli.output"}


def test_the_agent_imports_neither_the_ranks_code_nor_a_compiler() -> None:
    """Not through other rooms, and not within functions."""
    seen = {module for module in modules() if room_of(module) == "agent"}
    queue = list(seen)
    while queue:
        for other in imports(queue.pop()):
            if other in modules() and other not in seen and other != "kcoord":
                seen.add(other)
                queue.append(other)
    assert not {module for module in seen if room_of(module) in ("rank", "backends", "replay", "report", "cli")}
    heavy = {(m, other) for m in seen for other in imports(m) if other.partition(".")[0] in ("torch", "triton")}
    assert not heavy


def test_import_kcoord_imports_nothing_of_weight() -> None:
    code = f"import sys, kcoord; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_process_whose_compilers_are_hooked_imports_nothing_of_weight_before_one_compiles() -> None:
    """Each process that imports torch below a launcher pays for it, workers of data loaders included."""
    code = (
        "import sys; from kcoord.backends.registry import install; assert install();"
        f"print([name for name in (*{HEAVY!r}, 'asyncio', 'kcoord.rank', 'kcoord.artifacts') if name in sys.modules])"
    )
    with tempfile.TemporaryDirectory() as directory:
        environ = {**os.environ, "KCOORD_LOCAL_DIR": directory}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60
        )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_no_docstring_begins_with_a_riddle() -> None:
    """A docstring names a thing; it does not begin with a relative clause."""
    riddles = re.compile(r"(What|Whose|Whom|Who|Whatever|Where|Whether|How) ")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        (module, getattr(node, "name", ""))
        for module in modules()
        for node in ast.walk(tree_of(module))
        if isinstance(node, documented) and riddles.match(ast.get_docstring(node) or "")
    ]
    assert found == []


def test_development_md_draws_every_room() -> None:
    text = (ROOT / "docs" / "development.md").read_text()
    for floor in FLOORS[:-1]:
        for room in floor:
            if room not in ("__main__", "kcoord_launch", "testing", "autoload"):
                assert re.search(rf"^  {room}/ ", text, re.MULTILINE), room
    named = set(re.findall(r"`((?:kcoord|launch)/[\w/]+\.py)`", text))
    assert named
    for path in named:
        assert (ROOT / path).exists(), path
