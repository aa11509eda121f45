"""What does dividing by a parameter's contributors do, where a rank trains one of many heads in a step?

    python benchmarks/contributor_average.py

Eight tasks on scikit-learn's digits, one trunk, a head for each task; each rank draws a task in each step.
Trained with plain DDP, with the policy's average over the world, and over contributors, with SGD and AdamW and a sweep
of learning rates; and with the average over the world where the heads' rate is raised by ranks / (mean number of
contributors), which is what could be done without the policy. The models of a sweep train side by side. No root needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from contributor_average import summary, tasks, training
from tools import harness, testbed

PLANS = {
    "default": training.Plan(
        seeds=4,
        plain_seeds=1,
        checkpoints=(100, 300),
        draws=("uniform", "zipf"),
        rates={
            "SGD": (0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625),
            "AdamW": (0.032, 0.016, 0.008, 0.004, 0.002, 0.001),
        },
    ),
    "tiny": training.Plan(
        seeds=1, plain_seeds=1, checkpoints=(3, 12), draws=("uniform",), rates={"SGD": (0.5, 0.125), "AdamW": (0.01,)}
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--size", default="default", choices=list(PLANS))
    parser.add_argument("--timeout", type=float, default=900, help="seconds")
    parser.add_argument("--folder", type=Path, default=harness.RESULTS, help="where the result is written")
    options = parser.parse_args()
    plan = PLANS[options.size]
    if harness.is_rank():
        training.run_rank(plan)
        return 0
    header = harness.environment_header(sys.argv, options.hosts, [testbed.LOOPBACK])
    argv = [__file__, "--size", options.size]
    runs = testbed.launch(argv, options.hosts, testbed.LOOPBACK, options.timeout, echo_rank=None)[0].results
    rows = summary.summarise(runs, tasks.SHARES)
    distance = summary.distance_to_plain(runs, plan.checkpoints[0])
    sentence = summary.describe(rows, distance)
    results = {
        "benchmark": "contributor_average",
        "header": header,
        "plan": asdict(plan),
        "rows": rows,
        "sweep": summary.sweep(runs),
        "distance_to_plain": {str(steps): summary.distance_to_plain(runs, steps) for steps in plan.checkpoints},
        "sentence": sentence,
    }
    path = harness.write("contributor_average", results, options.folder)
    print(summary.table(json.loads(path.read_text())["rows"]))
    print(sentence)
    return 0


if __name__ == "__main__":
    sys.exit(main())
