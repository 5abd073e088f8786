"""The documentation says what the code does, and what it tells people to type works."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from kcoord.backends.registry import compilers
from kcoord.cli import _COMMANDS, cli
from kcoord.settings import FIELDS, variable
from tests import newest
from tests.support.sandbox import PROGRAMS, Sandbox

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted(DOCS.glob("*.md")),
    ROOT / "examples" / "README.md",
    *sorted(ROOT.glob("launch/*/*.md")),
]
_RESULT = re.compile(r"\((benchmarks/results/[^)]+\.md)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNS = {  # pages whose Python runs, block after block, and what they take for granted
    "docs/backends.md": "",
    "docs/warmup.md": "from pathlib import Path\nimport kcoord\n",
    "docs/keys.md": "from pathlib import Path\nimport kcoord\n",
}


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        spec.loader.exec_module(module)
    return module


def each_page(test: Any) -> Any:
    return pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))(test)


def blocks(page: Path, *languages: str) -> list[str]:
    return [body for language, body in BLOCK.findall(page.read_text()) if language in languages]


def typed(page: Path) -> list[list[str]]:
    """The commands of a page's blocks, in words; what is left out with "…" is left out."""
    found = []
    for block in blocks(page, "", "sh", "bash", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.removeprefix("$ ")
            if re.search(r"(^|\s)kcoord(-torchrun)?\s", line):
                with contextlib.suppress(ValueError):  # a picture, or a command's output
                    found.append([w for w in shlex.split(line, comments=True) if w != "…"])
    return found


@pytest.mark.parametrize("name", ["settings_page", "cli_page"])
def test_generated_pages_are_what_the_code_says(name: str) -> None:
    page = DOCS / name.replace("_page", ".md")
    assert page.read_text() == getattr(_generator(), name)(), "run: python docs/generate.py"


def test_the_picture_shows_the_results() -> None:
    assert (DOCS / "first-step.svg").read_text() == _generator().first_step.drawn(), "run: python docs/generate.py"


def test_the_picture_of_a_simulated_cluster_shows_its_result() -> None:
    from benchmarks.cluster import plot
    from benchmarks.result import RESULTS

    drawn = plot.draw(*plot.read((RESULTS / "cluster.md").read_text()))
    assert plot.DRAWING.read_text() == drawn, "run: python -m benchmarks.cluster.plot"


def test_the_picture_of_large_clusters_and_the_table_below_it_show_the_same_results() -> None:
    from benchmarks.cluster import plot_scale
    from benchmarks.cluster.scale import COLD, IN_STEP, PACKED, WARM

    found = plot_scale.rows_of(*plot_scale.DRAWN)
    assert plot_scale.DRAWING.read_text() == plot_scale.draw(found), "run: python -m benchmarks.cluster.plot_scale"
    measured = {(row["way"], row["keys"], row["nodes"]): row for row in found}
    text = re.sub(r"\[([\d.]+)\]\([^)]*\)", r"\1", (DOCS / "scale.md").read_text())
    for name, ways, keys, column in (
        ("cold, with a profile, s", [COLD], "300", "wall s"),
        ("cold, no profile, 30 kernels, s", [IN_STEP], "30", "wall s"),
        ("warm, no pack, s", [WARM], "300", "wall s"),
        ("warm, with a pack, s", [PACKED], "300", "wall s"),
        ("Redis CPU, s: cold, with a profile; warm, no pack", [COLD, WARM], "300", "Redis CPU s"),
    ):
        cells = text.partition(f"| {name} |")[2].split("|")[:4]
        for nodes, cell in zip(("10", "64", "256", "1,250"), cells, strict=True):
            for way, shown in zip(ways, cell.split(";"), strict=True):
                true = float(measured[way, keys, nodes][column])
                assert abs(float(shown) - true) <= 0.5 * 10 ** -len(shown.strip().partition(".")[2]) + 1e-9, (
                    name,
                    nodes,
                )


def test_the_readmes_seconds_are_those_of_the_results_that_it_links() -> None:
    """Those of a row's own link, else of its section's, rounded."""
    rows = 0
    for section in (ROOT / "README.md").read_text().split("\n## "):
        for row in (line for line in section.splitlines() if line.startswith("| ")):
            linked = re.findall(_RESULT, row) or re.findall(_RESULT, section)
            measured = [float(n) for file in linked for n in re.findall(r"\d+\.\d+", (ROOT / file).read_text())]
            for said in re.findall(r"\| \**(\d+(?:\.\d+)?) s\b", row):
                rows += 1
                half = 0.5 * 10 ** -len(said.partition(".")[2])
                assert any(abs(float(said) - number) <= half + 1e-9 for number in measured), (said, row)
    assert rows >= 20


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        if target.startswith("https://"):
            continue
        found = page.parent / target if target else page
        assert found.exists(), target
        if anchor:
            assert anchor in _anchors(found), f"{target}#{anchor}"


def _anchors(page: Path) -> list[str]:
    """Of headings, as Markdown's own tools and forges make them."""
    prose = BLOCK.sub("", page.read_text())
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles]


@each_page
def test_commands_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`kcoord ([a-z]+)", page.read_text()):
        assert name in _COMMANDS


@each_page
def test_variables_that_are_named_exist(page: Path) -> None:
    known = {variable(f.name) for f in FIELDS} | {"KCOORD_"}
    for name in re.findall(r"\bKCOORD_[A-Z_]*", page.read_text()):
        assert name in known


@each_page
def test_commands_in_blocks_are_commands(page: Path) -> None:
    """They parse, with every option, whoever launches them."""
    for words in typed(page):
        if "kcoord" in words:
            name, *arguments = words[words.index("kcoord") + 1 :]
            command = cli.get_command(click.Context(cli), name)
            assert command is not None, words
            with contextlib.suppress(click.exceptions.Exit):  # --help
                command.make_context(name, arguments)
        elif "kcoord-torchrun" in words:
            _parse_torchrun(words[words.index("kcoord-torchrun") + 1 :])


def _parse_torchrun(arguments: list[str]) -> None:
    run = pytest.importorskip("torch.distributed.run")
    from kcoord_launch.arguments import add_flags

    parser = run.get_args_parser()
    add_flags(parser)
    parser.parse_args(arguments)  # SystemExit for one that is none


@each_page
def test_files_in_blocks_exist_and_shell_is_shell(page: Path) -> None:
    for block in blocks(page, "", "sh", "bash"):
        for path in re.findall(r"(?<![\w/])(launch/\S+|k8s/[\w./-]+|examples/\S+)", block):
            assert (ROOT / path).exists(), path
    for block in blocks(page, "sh", "bash"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True, timeout=10)


@each_page
def test_python_in_blocks_is_python(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")


@pytest.mark.parametrize("page", RUNS)
def test_python_in_blocks_runs(sandbox: Sandbox, page: str) -> None:
    script = sandbox.root / "page.py"
    script.write_text(RUNS[page] + "\n".join(blocks(ROOT / page, "python")))
    done = sandbox.run(script)
    assert done.returncode == 0, done.stderr


def test_readmes_function_is_compiled_once(sandbox: Sandbox) -> None:
    script = sandbox.root / "page.py"
    taken_for_granted = "def my_compiler(config):\n    return b'code'\n"
    script.write_text(taken_for_granted + blocks(ROOT / "README.md", "python")[0])
    done = sandbox.run(script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("docs/index.md", "kcoord doctor"),
        ("docs/index.md", "kcoord-torchrun --standalone --nproc-per-node 8 train.py"),
        ("docs/torchrun.md", "kcoord exec -- torchrun --standalone --nproc-per-node 8 train.py"),
        ("docs/accelerate.md", "kcoord exec -- accelerate launch --multi_gpu --num_processes 8 train.py"),
    ],
)
def test_what_people_are_told_to_type_works(sandbox: Sandbox, page: str, command: str) -> None:
    """With two ranks, for a machine of two cores."""
    assert shlex.split(command) in typed(ROOT / page)
    pytest.importorskip("torch")
    if "accelerate" in command:
        pytest.importorskip("accelerate")
    shutil.copy(PROGRAMS / "generic_rank.py", sandbox.root / "train.py")
    program = "train.py" in command
    words = [*shlex.split(command.replace("8", "2")), *(["2", "0.05"] if program else [])]
    words += (
        ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_machines", "1"] if "--multi_gpu" in words else []
    )
    if "--multi_gpu" in words:  # accelerate's own options come before the script
        words = [*words[:5], *words[-6:], *words[5:-6]]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        words, env=sandbox.env(PATH=path), cwd=sandbox.root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    if program:
        assert "2 kernels: 2 compiled, 2 loaded" in done.stderr


def test_compatibility_quotes_the_releases_that_are_tested() -> None:
    rows = [f"| `{each.package}` | {', '.join(each.releases)} |" for each in newest.table()]
    page = (DOCS / "compatibility.md").read_text()
    assert "\n".join(["| package | releases |", "| --- | --- |", *rows, ""]) in page


def test_the_oldest_release_that_is_tested_is_the_oldest_that_doctor_accepts() -> None:
    oldest = {package: number for each in compilers() for package, number in each.packages.items()}
    for each in newest.table():
        number = oldest.get(each.package, ())
        assert tuple(map(int, each.releases[0].split(".")[: len(number)])) == number, each.package


def test_the_site_has_every_page_and_builds_strictly(tmp_path: Path) -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "site" / "index.html").read_text()
    assert not re.findall(r'(?:src|href)="https?://(?!squidfunk)', index), "it loads nothing from elsewhere"
