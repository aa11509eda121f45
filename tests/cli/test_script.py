"""A script that is run sees what it would see if Python had started it: compared with Python itself."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from commands import run_captured

SCRIPT_MODULE = Path(__file__).parents[2] / "ddp_hooks" / "cli" / "script.py"
# As `python -m ddp_hooks run` does it, without the time that it takes to import torch.
STARTER = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("script", {str(SCRIPT_MODULE)!r})
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
def main(arguments):
    script.run_script(arguments[1:], as_module=arguments[0] == "-m")
main(sys.argv[1:])
"""
# What Python shows of itself in tracebacks of `python -m`, and we do not.
PYTHONS_FRAMES = re.compile(r'[ |]*File "<frozen ')
ADDRESS = re.compile("0x[0-9a-f]+")

SCRIPTS = {
    "what it sees": """
        import sys
        own = {name: value for name, value in globals().items() if name not in ("sys", "__builtins__", "__loader__")}
        print(own, __builtins__, type(__loader__), sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
        import beside
        """,
    "leaves with a number": "import sys; sys.exit(3)",
    "leaves with a sentence": "import sys; sys.exit('a sentence')",
    "leaves without a word": "raise SystemExit",
    "raises": """
        def inner():
            raise ValueError("the reason")
        def outer():
            try:
                inner()
            except ValueError as error:
                raise RuntimeError("what came of it") from error
        outer()
        """,
    "has a hook for what it raises": """
        import sys
        def show(kind, error, traceback):
            print("hook", kind.__name__, error, traceback.tb_frame.f_code.co_name, traceback.tb_lineno)
        sys.excepthook = show
        raise KeyError("key")
        """,
    "raises a group": "raise ExceptionGroup('several', [ValueError('one'), TypeError('two')])",
    "cannot be parsed": "print('never')\nx = (",
    "imports what cannot be parsed": "import broken",
    "imports what is missing": "import nothing_of_that_name",
    "is interrupted": """
        import os, signal, time
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        """,
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "leaves without goodbye": "import os; os._exit(9)",
    "pickles its classes at the end": """
        import atexit, pickle
        class Own:
            value = 5
        @atexit.register
        def goodbye():
            print(pickle.loads(pickle.dumps(Own())).value, __name__, Own.__module__)
        """,
    "works on in a thread": """
        import threading, time
        def work():
            time.sleep(0.2)
            print(sorted(globals())[-3:])
        threading.Thread(target=work).start()
        print("main is done")
        """,
    "starts processes": """
        import multiprocessing, sys
        from dataclasses import dataclass
        print("module", __name__, sys.argv[1:])
        @dataclass
        class Own:
            value: int
        def double(own):
            return Own(2 * own.value)
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [Own(4)]))
        """,
    "is of an older time": '"""Its text."""\nfrom __future__ import annotations\nx: Missing = 3\nprint(__doc__, x)',
    "is undone": "import sys\nprint(sys.argv.pop())\nclass Late:\n    def __del__(self): print('gone')\nlate = Late()",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of scripts in another folder, where they are started."""
    import textwrap

    home = tmp_path_factory.mktemp("home")
    (home / "starter.py").write_text(STARTER)
    for place in (home / "scripts", home / "program"):
        place.mkdir()
        (place / "beside.py").write_text("print('beside')")
        (place / "broken.py").write_text("y = (")
    for name, text in SCRIPTS.items():
        (home / "scripts" / f"{name.replace(' ', '_')}.py").write_text(textwrap.dedent(text).lstrip("\n"))
    (home / "program" / "__main__.py").write_text(textwrap.dedent(SCRIPTS["what it sees"]))
    (home / "beside.py").write_text("print('beside the caller')")
    (home / "broken.py").write_text("y = )")
    (home / "link.py").symlink_to(home / "scripts" / "what_it_sees.py")
    return home


def run(folder: Path, *command: str, flags: tuple[str, ...] = ()) -> tuple[int, str, list[str]]:
    """Run Python, and return its status and what it shows, without what it shows of itself."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    completed = run_captured(
        [sys.executable, *flags, *command],
        cwd=folder,
        env=environment,
        timeout=300,
        # What a shell has started in the background ignores Ctrl-C.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    shown = [line for line in completed.stderr.splitlines() if not PYTHONS_FRAMES.match(line)]
    return completed.returncode, ADDRESS.sub("0x", completed.stdout), shown


def assert_same(folder: Path, *command: str) -> tuple[int, str, list[str]]:
    expected = run(folder, *command)
    assert run(folder, "-m", "starter", *(command if command[0] == "-m" else ("script", *command))) == expected
    return expected


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_is_as_if_python_had_started_it(folder: Path, name: str) -> None:
    stem = name.replace(" ", "_")
    outcome = assert_same(folder, f"scripts/{stem}.py", "one", "--two", "-m", "three")
    # The comparison can fail: these do not all end alike.
    assert (outcome[0] == 0) == (name in SCRIPTS_THAT_END_WELL), outcome
    if name in SHOWN_WITH_PYTHONS_FRAMES:
        # Python hands its own frames on here, which are nobody's business.
        assert run(folder, "-m", "starter", "-m", f"scripts.{stem}") == outcome
    else:
        assert_same(folder, "-m", f"scripts.{stem}", "one", "--two")


SHOWN_WITH_PYTHONS_FRAMES = {"has a hook for what it raises", "cannot be parsed"}
SCRIPTS_THAT_END_WELL = {
    "what it sees",
    "leaves without a word",
    "pickles its classes at the end",
    "works on in a thread",
    "starts processes",
    "is of an older time",
    "is undone",
}


def test_what_it_names_is_found_as_python_finds_it(folder: Path) -> None:
    import zipfile

    with zipfile.ZipFile(folder / "archive", "w") as archive:
        archive.writestr("__main__.py", "import sys; print(sys.argv, sys.path[0], __file__, __spec__.name)")
    outcomes = [
        assert_same(folder, *command)
        for command in (
            ["program", "one"],
            ["archive", "one"],
            ["link.py", "one"],
            [str(folder / "link.py")],
            ["scripts"],
            ["nothing.py"],
            ["-m", "nothing"],
            ["-m", "nothing.of.that"],
            ["-m", "program"],
            ["-m", "scripts"],
        )
    ]
    # `python -m program` finds no `beside` of its own, but the caller's.
    assert [status for status, *_ in outcomes] == [0, 0, 0, 0, 1, 2, 1, 1, 0, 1]
    assert "can't open file" in outcomes[5][2][0]


def test_only_the_scripts_frames_are_shown(folder: Path) -> None:
    for command in (["script", "scripts/raises.py"], ["-m", "scripts.raises"]):
        _, _, shown = run(folder, "-m", "starter", *command)
        frames = [line.split(", in ")[1] for line in shown if line.startswith("  File ")]
        # The error's cause, and the error.
        assert frames == ["outer", "inner", "<module>", "outer"], shown
        assert not any("starter" in line for line in shown)


def test_pythons_safe_path_is_left_as_it_is(folder: Path) -> None:
    command = ["scripts/what_it_sees.py"]
    expected = run(folder, *command, flags=("-P",))
    assert run(folder, str(folder / "starter.py"), "script", *command, flags=("-P",)) == expected
    assert expected[0] == 1
    assert "No module named 'beside'" in expected[2][-1]
