"""Makes the files of all rooms importable by name, also in the rank processes; chooses which tests run.

Without ``--all``, tests that are marked ``thorough`` do not run, and of a test with several parameters only so many
combinations that each value occurs. A test that is named with its parameters runs always.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

_here = Path(__file__).parent
_rooms = [str(_here), *(str(path) for path in sorted(_here.iterdir()) if path.is_dir() and path.name[0] not in "._")]
sys.path[:0] = _rooms
# For ddp_hooks_testing. Last, so that what is tested is the ddp_hooks that is installed, if one is.
sys.path.append(str(Path(__file__).parent.parent))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*_rooms, os.environ.get("PYTHONPATH", "")]))
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--all``."""
    parser.addoption("--all", action="store_true", help="every combination of parameters, and tests that take long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only ``--all`` runs."""
    if config.getoption("--all") or any("[" in argument for argument in config.args):
        return
    from quick import each_value

    by_function: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("thorough") is None:
            by_function[item.nodeid.split("[")[0]].append(item)
    chosen: set[pytest.Item] = set()
    for tests in by_function.values():
        # By identity: a parameter's values are the same objects in each of its combinations.
        values = [tuple(map(id, test.callspec.params.values())) if hasattr(test, "callspec") else () for test in tests]
        chosen.update(tests[position] for position in each_value(values))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


@functools.cache
def _why_no_cuda() -> str | None:
    import torch

    from ddp_hooks import _C

    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return _C.why_unserved(torch.device("cuda"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests on CUDA where there is none; where there has to be one, fail them, so that none is left out unseen."""
    if item.get_closest_marker("cuda") is None or _why_no_cuda() is None:
        return
    if os.environ.get("DDP_HOOKS_REQUIRE_CUDA") == "1":
        pytest.fail(f"DDP_HOOKS_REQUIRE_CUDA=1, but {_why_no_cuda()}", pytrace=False)
    pytest.skip(str(_why_no_cuda()))


@pytest.fixture(params=[False, True], ids=["avx2", "baseline"])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test with what processors without AVX2 run, too."""
    from ddp_hooks import _C
    from ddp_hooks_testing import _C as testing

    for extension in (_C, testing):
        extension.leave_out_avx2(request.param)
    yield
    for extension in (_C, testing):
        extension.leave_out_avx2(False)


@pytest.fixture(params=[False, True], ids=["denormals", "flush to zero"])
def floating_point_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test in both modes of the processor."""
    import torch

    if not torch.set_flush_denormal(request.param):
        pytest.skip("this CPU cannot flush denormals to zero")
    yield
    torch.set_flush_denormal(False)
