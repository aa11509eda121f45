"""What the pages show is so: code runs as pasted, commands and links lead somewhere, numbers are those measured.

The Python blocks of a user's page are pasted one after another into a file, which torchrun runs on two ranks.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from commands import run_captured
from quick import thorough
from torch.distributed.run import get_args_parser

import ddp_hooks
from ddp_hooks.cli import doctor, info, run

ROOT = Path(__file__).parents[2]
# How many blocks of Python they have: guards against a fence that the pattern does not see.
PAGES = {
    "README.md": 1,
    "docs/quickstart.md": 9,
    "docs/trainers.md": 10,
    "docs/doctor.md": 2,
    "docs/freezing.md": 8,
    "docs/fsdp.md": 3,
    "docs/gpus.md": 0,
    "docs/several-machines.md": 0,
    "docs/synchronising.md": 7,
    "docs/troubleshooting.md": 0,
}
# That of the trainers takes as long as all others, for what it imports.
WITH_CODE = [page for page in PAGES if PAGES[page] and page != "docs/trainers.md"]
IN_EVERY_RUN = ("README.md", "docs/quickstart.md")
# For developers, or made by a program.
OTHERS = ("*.md", "docs/*.md", "docs/internals/*.md", "benchmarks/*.md", "examples/*.md")
ALL_PAGES = sorted(path.relative_to(ROOT).as_posix() for pattern in OTHERS for path in ROOT.glob(pattern))
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".py", ".pyi", ".sh", ".toml", ".yml"}


def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), flags=re.MULTILINE | re.DOTALL)


def torchrun(folder: Path, *script: str) -> subprocess.CompletedProcess[str]:
    return run_captured(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )


def paste(page: str, folder: Path) -> Path:
    code = blocks(page, "python")
    assert len(code) == PAGES[page]
    script = folder / f"{Path(page).stem}_pasted.py"
    script.write_text("\n".join(code))
    return script


# Runs scripts one after another in the same processes, because importing torch takes longer than most of them. Each
# has a store of its own: in torchrun's it would find the addresses of the one before. As in other tests, each rank
# has a host of its own, so that bytes decide what leaves the all-reduces; but for README's script, which shows what it
# prints on one machine.
ONE_AFTER_ANOTHER = """
import contextlib, io, os, pathlib, runpy, sys
from torch.distributed import TCPStore

host = os.environ["MASTER_ADDR"]
launchers = TCPStore(host, int(os.environ["MASTER_PORT"]), is_master=False)
stores = []  # kept: another rank may not be through with its script
for script in sys.argv[1:]:
    if os.environ["RANK"] == "0":
        stores.append(TCPStore(host, 0, is_master=True, wait_for_workers=False))
        launchers.set(script, str(stores[-1].port))
    os.environ["MASTER_PORT"] = launchers.get(script).decode()
    if not script.startswith("README"):
        os.environ["DDP_HOOKS_HOST"] = os.environ["RANK"]
    sys.argv = [script]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    pathlib.Path(f"{script}.{os.environ['RANK']}").write_text(printed.getvalue())
"""


@pytest.fixture(scope="module")
def pasted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str | None, str]]:
    """Return for each page that is tested what went wrong, or None; and what it printed on both ranks."""
    folder = tmp_path_factory.mktemp("pasted")
    names = {item.name for item in request.session.items}
    chosen = [page for page in WITH_CODE if page == "README.md" or f"test_the_code_runs_as_pasted[{page}]" in names]
    # One launch runs all of them, one after another.
    scripts = {page: paste(page, folder) for page in chosen}
    # A fresh environment has no numpy, and torch does without.
    without_numpy = "import sys; sys.modules['numpy'] = None"
    (folder / "one_after_another.py").write_text(without_numpy + ONE_AFTER_ANOTHER)
    done = torchrun(folder, "one_after_another.py", *(script.name for script in scripts.values()))
    outcomes: dict[str, tuple[str | None, str]] = {}
    for page, script in scripts.items():
        printed = [Path(f"{script}.{rank}") for rank in range(2)]
        has_ended = all(each.exists() for each in printed)
        outcomes[page] = (None, "".join(e.read_text() for e in printed)) if has_ended else (done.stderr, "")
    if done.returncode != 0 and all(problem is None for problem, _ in outcomes.values()):
        pytest.fail(f"all scripts ran, and then their processes ended with an error: {done.stderr}")
    return outcomes


@pytest.mark.parametrize("page", [page if page in IN_EVERY_RUN else thorough(page)[0] for page in WITH_CODE])
def test_the_code_runs_as_pasted(page: str, pasted: dict[str, tuple[str | None, str]]) -> None:
    problem, _ = pasted[page]
    assert problem is None, problem


def test_the_script_of_the_readme_prints_what_it_shows(pasted: dict[str, tuple[str | None, str]]) -> None:
    (shown,) = blocks("README.md", "text")
    assert without_numbers(pasted["README.md"][1]) == without_numbers(shown)


@pytest.mark.thorough
def test_the_code_for_trainers_runs_as_pasted(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    (tmp_path / "one_after_another.py").write_text(ONE_AFTER_ANOTHER)
    (tmp_path / "stand_in").mkdir()
    (tmp_path / "stand_in" / "wandb.py").write_text(STAND_IN_FOR_WANDB)
    script = paste("docs/trainers.md", tmp_path)
    # Not before that block, or trainers would take it for the package.
    find_stand_in = "import sys; sys.path.insert(0, 'stand_in')\nimport wandb\n"
    script.write_text(script.read_text().replace("import wandb\n", find_stand_in))
    done = torchrun(tmp_path, "one_after_another.py", script.name)
    assert done.returncode == 0, done.stderr
    logged = json.loads((tmp_path / "logged.json").read_text())
    assert len(logged) == 3
    assert logged["ddp_hooks/saved_fraction"] > 0.05


# As much of wandb (the page was run with 0.31.0) as the page uses, because tests do not install it.
STAND_IN_FOR_WANDB = """
import contextlib, json, pathlib

class Run(contextlib.nullcontext):
    def log(self, data, step=None):
        pathlib.Path("logged.json").write_text(json.dumps(data))

    def __enter__(self):
        return self

def init(project=None, mode=None):
    return Run()
"""


def without_numbers(text: str) -> str:
    """Leave out what differs from run to run, units included, and where lines end."""
    return " ".join(re.sub(r"\d[\d.,]*( (us|ms|s|k?B)\b)?", "<n>", text).split())


# --- what is not Python


def commands(page: str) -> list[list[str]]:
    """Return the words of each line of Bash, without variables that it sets in front."""
    text = "".join(blocks(page, "bash")).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines() if line.strip()]
    return [list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words)) for words in lines]


def launchers_parser() -> argparse.ArgumentParser:
    """Return torchrun's parser, with an error in place of an exit."""
    parser = get_args_parser()
    parser.exit_on_error = False
    return parser


def our_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    choices = parser.add_subparsers(dest="command", required=True)
    for command in (info, run, doctor):
        command.add_to(choices)
    return parser


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_there(page: str) -> None:
    for program, *arguments in commands(page):
        if program == "make":
            assert all(re.search(rf"^{target}:", read("Makefile"), re.MULTILINE) for target in arguments)
        elif program == "pip":
            check_pip(arguments)
        elif program == "torchrun":
            launched = launchers_parser().parse_args(arguments)
            hosts = int(launched.nnodes.rpartition(":")[2])
            assert hosts * int(launched.nproc_per_node) == 2
            if launched.module:
                assert launched.training_script == "ddp_hooks"
                our_parser().parse_args(launched.training_script_args)
        elif program == "python" and arguments[0] == "-m":
            assert arguments[1] == "ddp_hooks"
            our_parser().parse_args(arguments[2:])
        else:
            assert program == "python", program
            check_benchmark(" ".join([program, *arguments]))


def check_pip(arguments: list[str]) -> None:
    action, option, *what = arguments
    assert action == "install"
    if option.endswith(".whl"):
        assert re.fullmatch(rf"ddp_hooks-{ddp_hooks.__version__}-cp311-cp311-manylinux_2_28_x86_64\.whl", option)
        return
    if option != "--no-build-isolation":  # what that would have installed
        required = re.findall(r"^(?:requires|integrations) = \[(.+)\]", read("pyproject.toml"), re.MULTILINE)
        assert {f'"{package}"' for package in (option, *what)} <= set(", ".join(required).split(", "))
        return
    found = re.fullmatch(r"(?:-e )?\.(?:\[(\w+)\])?", " ".join(what))
    assert found is not None
    assert found[1] is None or re.search(rf"^{found[1]} = \[", read("pyproject.toml"), re.MULTILINE)


def check_benchmark(command: str) -> None:
    """A result is quoted with the command that stands in its file."""
    results = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")]
    assert command in {result["header"]["command"] for result in results if "header" in result}


# Where a row of the README's table comes from: the file, the workload.
RESULTS = tuple(("readme_1gbit", workload) for workload in ("e5", "frozen:0.5", "gpt2_autocast", "linears"))


def test_the_results_are_those_that_were_measured() -> None:
    page = read("README.md")

    def check(name: str, plain: dict[str, Any], hook: dict[str, Any], sent: list[float]) -> None:
        megabytes = [f"{bytes_sent / 1e6:.1f}" for bytes_sent in sent]
        milliseconds = [f"{row['step_seconds']['median'] * 1e3:.0f}" for row in (plain, hook)]
        ratio = hook["ratio_to_baseline"]["median"]
        cells = f"| {' → '.join(megabytes)} MB | {' → '.join(milliseconds)} ms | {ratio:.2f} | [{name}]"
        assert cells in page

    for name, workload in RESULTS:
        rows = json.loads(read(f"benchmarks/results/{name}.json"))["rows"]
        by_peer = {row["peer"]: row for row in rows if row["workload"] == workload}
        plain, hook = by_peer["plain"], by_peer["ours:auto:native"]
        check(name, plain, hook, [plain["payload_bytes"], hook["payload_bytes"]])
    rows = json.loads(read("benchmarks/results/fsdp_1gbit.json"))["rows"]
    plain, _, hook = (row for row in rows if row["workload"] == "mixtral")
    check("fsdp_1gbit", plain, hook, [hook["dense_bytes"], hook["payload_bytes"]])
    assert sum(row["differing_gradients"] for row in rows) == 0
    rows = json.loads(read("benchmarks/results/hook_overhead.json"))["rows"]
    (loss,) = [row for row in rows if (row["workload"], row["peer"]) == ("layers:0", "ours:auto:native")]
    assert f"| {loss['ratio_to_baseline']['median']:.3f} | [hook_overhead]" in page


def test_the_readme_quotes_the_doctor() -> None:
    (shown,) = blocks("README.md", "console")
    whole = blocks("docs/doctor.md", "console")[0].splitlines()
    assert all(line in whole or line == "..." for line in shown.splitlines())


def test_the_messages_are_those_of_the_sources() -> None:
    # What others print is compared with their sources in test_troubleshooting.py.
    page = re.sub(r"\n## Errors of DDP.*?(?=\n## )", "", read("docs/troubleshooting.md"), flags=re.DOTALL)
    cells = re.findall(r"^\| `([^`]+)`[^|]* \| [^|]* \|$", page, re.MULTILINE)
    messages = [cell for cell in cells if " " in cell and "=" not in cell]
    assert len(messages) > 12
    text = said()
    assert [message for message in messages if message not in text] == []


def said() -> str:
    """Return the sources, with literals that stand one after another as one text, and `...` for what is filled in."""
    paths = [*(ROOT / "ddp_hooks").rglob("*.py"), ROOT / "setup.py", *(ROOT / "csrc").rglob("*.cpp")]
    texts = [
        re.sub(r"\{[^{}\n]*\}", "...", path.read_text()) if path.suffix == ".py" else path.read_text() for path in paths
    ]
    return re.sub(r'"\s*(?:<<\s*)?f?"', "", "\n".join(texts))


# --- the pages


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    for trainer in ("lightning", "transformers"):
        pytest.importorskip(trainer)
    import reference

    return reference


def test_the_reference_is_current(reference: ModuleType) -> None:
    assert reference.PAGE.read_text() == reference.make_page(), "run `make reference`"


def test_everything_public_is_in_the_reference(reference: ModuleType) -> None:
    shown = {thing.__name__ for section in reference.SECTIONS.values() for thing in section.objects}
    for module in (ddp_hooks, ddp_hooks.sync, ddp_hooks.doctor, ddp_hooks.fsdp):
        things = {name: getattr(module, name) for name in module.__all__}
        assert {name for name, thing in things.items() if inspect.isclass(thing) or inspect.isroutine(thing)} <= shown
    assert {name for name in vars(ddp_hooks.errors) if name.endswith("Error")} <= shown


def test_the_reference_is_all_markdown() -> None:
    assert re.findall(r":\w+:`|``|::$|^ {4}", prose("docs/reference.md"), re.MULTILINE) == []


def prose(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", read(page), flags=re.MULTILINE | re.DOTALL)


def anchors(page: str) -> set[str]:
    """Return what links to headings are called, as GitHub makes them."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        found.append(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
    return {name if not earlier else f"{name}-{earlier}" for name, earlier in numbered(found)}


def numbered(names: list[str]) -> Iterator[tuple[str, int]]:
    """Yield each name, and how often it came before."""
    for place, name in enumerate(names):
        yield name, names[:place].count(name)


def broken_links(page: str) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        if target.startswith("https://"):
            continue
        place = (ROOT / page).parent / path if path else ROOT / page
        if not place.exists() or (anchor and anchor not in anchors(place.resolve().relative_to(ROOT).as_posix())):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", ALL_PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# Twice\n\n```python\n# Not a heading\n```\n## `f(x)`\n# Twice\n")
    good = ["other.md", "other.md#twice", "other.md#twice-1", "other.md#fx", "#here", "https://example.org/no"]
    bad = ["another.md", "other.md#not-a-heading", "other.md#twice-2", "#there"]
    (tmp_path / "page.md").write_text("# Here\n" + "".join(f"[a link]({target})\n" for target in good + bad))
    assert broken_links("page.md") == bad


def test_pages_that_sources_name_are_there() -> None:
    sources = [ROOT / "Makefile", ROOT / "setup.py", ROOT / "pyproject.toml"]
    for folder in ("csrc", "ddp_hooks", "tests", "benchmarks", "examples"):
        sources += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    named = {name for path in sources for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text())}
    assert len(named) > 5
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_trainers_are_those_that_were_tested() -> None:
    listed = re.search(r"^integrations = \[(.*)\]$", read("pyproject.toml"), re.MULTILINE)
    assert listed is not None
    bounds = dict(each.split(">=") for each in re.findall(r'"(.*?)"', listed[1]))
    table = read("docs/tested-versions.md").partition("## Trainers")[2]
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|$", table, re.MULTILINE)
    assert [name for name, *_ in rows] == list(bounds)
    for name, oldest, newest in rows:
        assert release(oldest)[: len(release(bounds[name]))] == release(bounds[name])
        assert release(oldest) <= release(importlib.metadata.version(name))
        assert release(oldest) <= release(newest)
    command = " ".join(f"'{name}>={bound}'" for name, bound in bounds.items())
    assert f"pip install {command}\n" in read("docs/trainers.md")


def release(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]
