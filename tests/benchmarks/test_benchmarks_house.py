"""How benchmarks/ is built: imports point downwards, nobody uses another's underscored names, commands name real files.

Files are read, none is imported. The same checks find what is wrong with small made-up trees.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
LOWEST = "tools"
# What is underscored and used all the same, and why.
EXCEPTIONS = {
    "os._exit": "is documented, underscore and all",
    "ddp_hooks._C": "has the kernels, which are measured without what Python puts around them",
    "ddp_hooks_testing._C": "has those that the package runs within a step only",
    "ddp_hooks_testing._pretend": "counts what the pretended device is asked to do, which only it knows",
    "ddp_hooks_testing._emulated": "has the groups whose other ranks are emulated",
    "control_groups._open_group": "makes the groups for masks, in place of which emulated ones are made",
    "torch.cuda._sleep": "keeps the device busy, which nothing public does",
    "torch._foreach_copy_": "is the fastest copy there is, to compare with",
    "dist._broadcast_coalesced": "is how DDP itself sends parameters, to compare with",
    "dist.distributed_c10d._world": "lists process groups, which nothing public does",
}
# The changelog is history and may name what is gone.
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "benchmarks/*.md", "Makefile")
CODE = (
    "benchmarks/**/*.py",
    "benchmarks/*.sh",
    "benchmarks/**/*.cpp",
    "csrc/**/*.h",
    "csrc/**/*.cpp",
    "ddp_hooks/**/*.py",
)
A_FILE = re.compile(r"(?<![\w/])benchmarks/[\w/]*\w\.(?:py|sh|cpp|json|md|svg)\b")


def room(path: str) -> str:
    """The folder of a file, or nothing for a script on top."""
    return path.rpartition("/")[0]


def find(module: str, sources: Mapping[str, str]) -> str | None:
    """The file that `import module` loads; of a room and a script with the same name Python takes the room."""
    path = module.replace(".", "/")
    return next((file for file in (f"{path}/__init__.py", f"{path}.py") if file in sources), None)


def imports(path: str, sources: Mapping[str, str]) -> set[str]:
    """The files of the tree that one of them imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(sources[path])):
        if isinstance(node, ast.Import):
            found |= {find(alias.name, sources) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {alias.name: find(f"{node.module}.{alias.name}", sources) for alias in node.names}
            found |= {file or find(node.module, sources) for file in inner.values()}
    return {file for file in found if file is not None}


def circles(graph: Mapping[str, set[str]]) -> Iterator[str]:
    """One circle for each way back that a walk from every node meets."""
    done: set[str] = set()

    def walk(node: str, trail: list[str]) -> Iterator[str]:
        if node in trail:
            yield " -> ".join([*trail[trail.index(node) :], node])
        elif node not in done:
            for other in sorted(graph.get(node, ())):
                yield from walk(other, [*trail, node])
            done.add(node)

    for start in sorted(graph):
        yield from walk(start, [])


def own_names(tree: ast.AST) -> set[str]:
    """What a file defines: functions, classes, variables, and attributes of `self` and `cls`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
    return names


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_underscored(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def underscored(path: str, text: str) -> Iterator[str]:
    tree = ast.parse(text)
    mine = own_names(tree)
    for node in ast.walk(tree):
        used: list[str] = []
        if isinstance(node, ast.Attribute) and is_underscored(node.attr):
            used = [] if is_own(node.value) or node.attr in mine else [ast.unparse(node)]
        elif isinstance(node, ast.Import):
            used = [alias.name for alias in node.names if any(map(is_underscored, alias.name.split(".")))]
        elif isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            used = [name for name in whole if any(map(is_underscored, name.split(".")))]
        yield from (f"{path} uses {name}" for name in used if name not in EXCEPTIONS)


def faults(sources: Mapping[str, str]) -> list[str]:
    """What is wrong with a tree, given as texts by their paths in it."""
    files = {path: imports(path, sources) for path in sources}
    rooms: dict[str, set[str]] = {}
    found = [f"circle: {circle}" for circle in circles(files)]
    for path, imported in files.items():
        for other in sorted(imported):
            if not room(other):
                found.append(f"{path} imports {other}, a script")
            elif room(path) != room(other):
                rooms.setdefault(room(path), set()).add(room(other))
                if room(path) == LOWEST:
                    found.append(f"{path} imports {other}, but nothing is below {LOWEST}/")
        found += underscored(path, sources[path])
        if any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(ast.parse(sources[path]))):
            found.append(f"{path} imports by a relative name")
        if room(path) and f"{room(path)}/__init__.py" not in sources:
            found.append(f"{room(path)}/ has no __init__.py, so a script of that name would be imported in its place")
    return found + [f"circle of rooms: {circle}" for circle in circles(rooms)]


def named_files(text: str) -> set[str]:
    return set(A_FILE.findall(text))


def test_the_house_has_no_faults() -> None:
    sources = {file.relative_to(BENCHMARKS).as_posix(): file.read_text() for file in BENCHMARKS.rglob("*.py")}
    assert faults(sources) == []
    # The checks have seen what is there.
    assert "tools/harness.py" in imports("slow_link.py", sources)
    assert "micro/ranks.py" in imports("micro.py", sources)
    assert "tools/peers.py" in imports("tools/harness.py", sources)


@pytest.mark.parametrize("pattern", [*DOCUMENTS, *CODE, "tests/**/*.py"])
def test_every_file_that_is_named_is_there(pattern: str) -> None:
    files = [file for file in ROOT.glob(pattern) if file != Path(__file__)]
    assert files
    missing = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in named_files(file.read_text())
        if not (ROOT / name).exists()
    }
    assert missing == set()


def test_every_result_can_be_made_again_by_its_command() -> None:
    results = list(BENCHMARKS.glob("results/*.json"))
    assert results
    for file in results:
        python, script, *_ = json.loads(file.read_text())["header"]["command"].split()
        assert python == "python"
        assert (ROOT / script).is_file(), f"{file.name} was made by {script}, which is gone"


def test_every_result_is_cited() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *BENCHMARKS.glob("*.md")]
    sources = [*(ROOT / "ddp_hooks").rglob("*.py"), *(ROOT / "csrc").rglob("*.h")]
    text = "\n".join(file.read_text() for file in [*pages, *sources])
    files = [*BENCHMARKS.glob("results/*"), *BENCHMARKS.glob("figures/*")]
    assert [file.name for file in files if f"/{file.name}" not in text] == []


def test_every_script_on_top_answers_a_question_in_the_readme() -> None:
    questions = named_files((BENCHMARKS / "README.md").read_text())
    scripts = [*BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("*.sh")]
    assert {script.relative_to(ROOT).as_posix() for script in scripts} <= questions


TOOLS = {"tools/__init__.py": "", "tools/low.py": "import os\n\nos._exit(0)", "tools/other.py": "from tools import low"}
ROOMS = {**TOOLS, "a/__init__.py": "", "a/x.py": "import tools.low", "b/__init__.py": "", "b/x.py": "from a.x import f"}
GOOD = {**ROOMS, "a.py": "from a import x\nfrom b.x import g", "b.py": "class A:\n    _n = 0\n\n\nA._n += 1"}


def test_a_made_up_house_without_faults() -> None:
    assert faults(GOOD) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"tools/low.py": "import tools.other"}, ["circle: tools/low.py -> tools/other.py -> tools/low.py"]),
        (
            {"tools/low.py": "def late():\n    from tools.other import f"},
            ["circle: tools/low.py -> tools/other.py -> tools/low.py"],
        ),
        ({"a/y.py": "import b.x"}, ["circle of rooms: a -> b -> a"]),
        ({"tools/new.py": "import a.y", "a/y.py": ""}, ["tools/new.py imports a/y.py", "circle of rooms"]),
        ({"tools/new.py": "import script", "script.py": ""}, ["tools/new.py imports script.py, a script"]),
        ({"b/y.py": "import script", "script.py": ""}, ["b/y.py imports script.py, a script"]),
        ({"script.py": "import second", "second.py": ""}, ["script.py imports second.py, a script"]),
        ({"a/y.py": "from . import x"}, ["a/y.py imports by a relative name"]),
        ({"c/x.py": ""}, ["c/ has no __init__.py"]),
        ({"a/y.py": "from tools import low\n\nlow._save()"}, ["a/y.py uses low._save"]),
        ({"a/y.py": "from tools.low import _save"}, ["a/y.py uses tools.low._save"]),
        ({"a/y.py": "import tools._hidden"}, ["a/y.py uses tools._hidden"]),
        ({"a/y.py": "def f(state):\n    state._handle = state.x"}, ["a/y.py uses state._handle"]),
    ],
)
def test_a_fault_is_found(changed: dict[str, str], expected: list[str]) -> None:
    found = faults({**GOOD, **changed})
    assert len(found) == len(expected), found
    assert all(fault.startswith(start) for fault, start in zip(found, expected, strict=True))


def test_a_file_that_is_gone_is_seen_in_a_command() -> None:
    assert named_files("run `python benchmarks/gone.py --json out.json`, then benchmarks/tools/testbed.py.") == {
        "benchmarks/gone.py",
        "benchmarks/tools/testbed.py",
    }
