"""Which file may use which: no circles, nobody's private names, and rooms that need only what lies below them.

Sources are read, not run. Each language turns its files into a graph of who uses whom; what must hold of a graph is
the same for all of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from mutants import DELETIONS, Deletion

ROOT = Path(__file__).parents[2]

# --- graphs

Graph = Mapping[str, set[str]]  # by what is used in it


def find_circle(graph: Graph) -> list[str]:
    """Return what uses itself through others, from one to the same one again; empty if nothing does."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = list(reversed(error.args[1]))[1:]
        first = circle.index(min(circle))
        return [*circle[first:], *circle[:first], circle[first]]
    return []


def find_climbers(graph: Graph, levels: Sequence[Sequence[str]], separator: str) -> list[str]:
    """Return which files use one of a higher level, or stand in no room.

    Args:
        graph: files by what they use.
        levels: the names of rooms, from the ground up. The room of a file is the first part of its name.
        separator: between the parts of a name.
    """
    level = {room: number for number, rooms in enumerate(levels) for room in rooms}
    room_of = {name: name.partition(separator)[0] for name in graph}
    problems = [f"{name} stands in no room" for name, room in sorted(room_of.items()) if room not in level]
    for name, used in sorted(graph.items()):
        problems += [
            f"{name} uses {other}, which stands above it"
            for other in sorted(used & graph.keys())
            if level.get(room_of[other], 0) > level.get(room_of[name], len(levels))
        ]
    return problems


# --- Python

# The rooms of ddp_hooks/ from the ground up, and the files that stand beside them; the package itself is "".
PYTHON_LEVELS = (
    ("_C", "_extension", "_version", "errors", "policies", "statistics", "wording"),
    ("hangs",),
    ("serving",),
    ("fsdp", "sync"),
    ("enabling", "freezing", "hooks"),
    ("doctor", "integrations"),
    ("", "cli", "__main__"),
)


@dataclass(frozen=True, slots=True)
class Module:
    """What one Python file says of others.

    Attributes:
        name: as it is imported.
        imports: the modules of the same package that it imports, anywhere in it.
        private: the underscored names that it defines: globals, arguments, attributes of classes and of their `self`.
        uses: the underscored names of something else that it uses: the line, what it is taken from, and the name.
    """

    name: str
    imports: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    uses: list[tuple[int, str, str]] = field(default_factory=list)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def module_name(path: str) -> str:
    return path.rsplit(".", 1)[0].removesuffix("/__init__").replace("/", ".")


def read_modules(sources: Mapping[str, str]) -> list[Module]:
    """Read the files of one package: their texts by path, as `ddp_hooks/sync/__init__.py`."""
    names = {module_name(path) for path in sources}
    return [read_module(path, ast.parse(text), names) for path, text in sources.items()]


def read_module(path: str, tree: ast.Module, names: set[str]) -> Module:
    """Read one file; `names` are all modules of the package."""
    module = Module(module_name(path))
    aliases: dict[str, str] = {}  # what modules of the package are called here
    package = module.name if path.endswith("/__init__.py") else module.name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in names:
                    module.imports.add(alias.name)
                    aliases[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
            source = ".".join(filter(None, [above if node.level else "", node.module]))
            for alias in node.names if source in names else []:
                inner = f"{source}.{alias.name}"
                module.imports.add(inner if inner in names else source)
                if inner in names:
                    aliases[alias.asname or alias.name] = inner
                elif is_private(alias.name):
                    module.uses.append((node.lineno, source, alias.name))
        else:
            module.private.update(filter(is_private, defined_names(node)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            if f"{aliases.get(owner)}.{node.attr}" not in names:
                module.uses.append((node.lineno, aliases.get(owner, ""), node.attr))
    return module


def defined_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
        yield node.attr


def find_trespasses(modules: list[Module]) -> list[str]:
    """Return who uses a private name of another module: imported, of the module itself, or of an object of its class.

    Whose an attribute is shows by its name: it is another module's if that defines it and this one does not. So what is
    private to torch may be used, and an attribute of another class in the same module.
    """
    trespasses = []
    for module in modules:
        for line, source, name in sorted(module.uses):
            if source and source != module.name:
                owners = [source]
            elif name in module.private:
                owners = []
            else:
                owners = [other.name for other in modules if name in other.private]
            if owners:
                trespasses.append(f"{module.name}, line {line}: {name} of {' or '.join(owners)}")
    return trespasses


def python_problems(sources: Mapping[str, str], levels: Sequence[Sequence[str]]) -> list[str]:
    modules = read_modules(sources)
    graph = {module.name: module.imports for module in modules}
    problems = find_trespasses(modules)
    circle = find_circle(graph)
    if circle:
        problems.append(f"circle: {' -> '.join(circle)}")
    inner = {name.partition(".")[2]: {other.partition(".")[2] for other in used} for name, used in graph.items()}
    return problems + find_climbers(inner, levels, ".")


def test_python() -> None:
    folder = ROOT / "ddp_hooks"
    paths = [*folder.rglob("*.py"), *folder.rglob("*.pyi")]
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    assert len(sources) > 30
    assert python_problems(sources, PYTHON_LEVELS) == []


# What other people's training loops need is imported by those who name the room.
TRAINERS = {"accelerate", "lightning", "pytorch_lightning", "tensorboard", "transformers"}


def test_only_the_integrations_import_trainers() -> None:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "ddp_hooks").rglob("*.py")}
    for path, text in sources.items():
        imported = {
            alias.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for alias in node.names
        }
        imported |= {node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
        packages = {name.partition(".")[0] for name in imported}
        assert path.startswith("ddp_hooks/integrations/") or not packages & {*TRAINERS, "integrations"}, path


STATE = "class State:\n    def __init__(self):\n        self._engine = _make()\ndef _make(): ...\n"


@pytest.mark.parametrize(
    ("sources", "problem"),
    [
        ({"a": "from .b import x", "b": "import p.a"}, "circle: p.a -> p.b -> p.a"),
        ({"a": "from . import b", "b": "def f():\n    from .a import x"}, "circle: p.a -> p.b -> p.a"),
        ({"a": "from p import b", "b": "if TYPE_CHECKING:\n    from .a import x"}, "circle: p.a -> p.b -> p.a"),
        ({"__init__": "from .a import x", "a": "from . import y"}, "circle: p -> p.a -> p"),
        (
            {"room/__init__": "from .a import x", "room/a": "from ..room import y"},
            "circle: p.room -> p.room.a -> p.room",
        ),
        ({"a": "from . import b", "b": "from . import c", "c": "from . import a"}, "circle: p.a -> p.b -> p.c -> p.a"),
        ({"a": STATE, "b": "from .a import _make"}, "p.b, line 1: _make of p.a"),
        ({"a": STATE, "b": "from . import a as other\nother._make()"}, "p.b, line 2: _make of p.a"),
        ({"a": STATE, "b": "import p.a\ndef _make(): p.a._make()"}, "p.b, line 2: _make of p.a"),
        ({"a": STATE, "b": "def f(state):\n    return state._engine"}, "p.b, line 2: _engine of p.a"),
        ({"a": STATE, "b": "def f(state):\n    state._engine = None"}, "p.b, line 2: _engine of p.a"),
        (
            {"a": STATE, "b": "from .a import State\nclass B(State):\n    def f(self): return self._engine"},
            "p.b, line 3: _engine of p.a",
        ),
        ({"room/a": "from ..hooks import x", "hooks": ""}, "room.a uses hooks, which stands above it"),
        ({"low": "from .room.a import x", "room/a": ""}, "low uses room.a, which stands above it"),
        ({"other/a": ""}, "other.a stands in no room"),
    ],
)
def test_what_is_found_in_python(sources: dict[str, str], problem: str) -> None:
    assert problem in python_problems(made_up(sources), MADE_UP_LEVELS)


@pytest.mark.parametrize(
    "sources",
    [
        {"a": STATE, "b": "from .a import State\nfrom . import _c\n_c.x", "_c": ""},
        {"a": STATE, "b": "from ._c import __version__\nstate.__dict__", "_c": "__version__ = 1"},
        {"a": STATE, "b": "from torch import _C\ndef f(ddp): return ddp._comm_hooks, _C._x"},
        {
            "a": STATE + "def f(state): return state._engine",
            "b": "class B:\n    _engine = 1\n    x = lambda b: b._engine",
        },
        {"room/a": "from .. import low\nfrom .b import x", "room/b": "", "low": "", "hooks": "from .room import a"},
    ],
)
def test_what_may_be_in_python(sources: dict[str, str]) -> None:
    assert python_problems(made_up(sources), MADE_UP_LEVELS) == []


MADE_UP_LEVELS = (("low", "_c"), ("room",), ("a", "b", "c", "hooks", ""))


def made_up(sources: dict[str, str]) -> dict[str, str]:
    return {"p/__init__.py": "", "p/room/__init__.py": ""} | {f"p/{name}.py": text for name, text in sources.items()}


# --- C++

# The rooms of csrc/ from the ground up: a file includes files of its own room and of lower ones.
# Transport stands below the detectors, because it must not know where a mask came from.
CXX_LEVELS = tuple(
    (room,)
    for room in (
        "system",
        "kernels",
        "layout",
        "reducer",
        "agreement",
        "plan",
        "transport",
        "detectors",
        "engine",
        "bindings",
        "testing",
    )
)


def cxx_problems(sources: Mapping[str, str], levels: Sequence[Sequence[str]] = CXX_LEVELS) -> list[str]:
    """Read the includes of files by their paths in csrc/, as `plan/reduction_plan.cpp`."""
    graph = {path: set(re.findall(r'^#include "([^"]+)"', text, re.MULTILINE)) for path, text in sources.items()}
    problems = [
        f"{path} includes {other}, which is not there: paths begin with the room"
        for path, included in sorted(graph.items())
        for other in sorted(included - graph.keys())
    ]
    circle = find_circle(graph)
    if circle:
        problems.append(f"circle: {' -> '.join(circle)}")
    return problems + find_climbers(graph, levels, "/")


def test_cxx() -> None:
    folder = ROOT / "csrc"
    paths = [path for path in folder.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    assert len(paths) > 60
    assert cxx_problems({path.relative_to(folder).as_posix(): path.read_text() for path in paths}) == []


@pytest.mark.parametrize(
    ("sources", "problem"),
    [
        ({"low/a.h": '#include "high/b.h"\n', "high/b.h": ""}, "low/a.h uses high/b.h, which stands above it"),
        ({"low/a.h": '#include "b.h"\n', "low/b.h": ""}, "low/a.h includes b.h, which is not there"),
        ({"low/a.h": '#include "low/b.h"\n', "low/b.h": '#include "low/a.h"\n'}, "circle: low/a.h -> low/b.h"),
        ({"a.h": ""}, "a.h stands in no room"),
    ],
)
def test_what_is_found_in_cxx(sources: dict[str, str], problem: str) -> None:
    assert problem in "\n".join(cxx_problems(sources, (("low",), ("high",))))


def test_what_may_be_in_cxx() -> None:
    sources = {
        "low/a.h": "#include <vector>\n",
        "high/b.h": '#include "low/a.h"\n#include "high/c.h"\n',
        "high/c.h": "",
    }
    assert cxx_problems(sources, (("low",), ("high",))) == []


# --- mutants


@pytest.mark.parametrize("deletion", DELETIONS, ids=lambda deletion: deletion.name)
def test_what_mutants_delete_is_there(deletion: Deletion) -> None:
    assert deletion.path.read_text().count(deletion.text) == 1
