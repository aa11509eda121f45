"""What all figures have in common. Needs matplotlib, which is imported when the first one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    # The same file from the same JSON: no random ids, no date.
    matplotlib.rcParams.update({"svg.hashsalt": "ddp_hooks", "font.size": 9, "axes.spines.top": False})
    matplotlib.rcParams.update({"axes.spines.right": False, "legend.frameon": False})
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def put_legend_below(figure: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2)
