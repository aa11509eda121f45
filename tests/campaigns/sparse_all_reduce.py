"""Shows that torch's all-reduce of sparse tensors over gloo corrupts the heap now and then, with nothing but torch.

    python tests/campaigns/sparse_all_reduce.py

Two ranks have six sparse all-reduces under way at once. With torch 2.13.0 a rank dies of a signal within some thousand
steps; dense tensors, and one sparse tensor at a time, go through. Plain DDP does the same for a model with several
``nn.Embedding(sparse=True)``, and now and then for a model with one. It is why tests with sparse gradients run once
more if a rank dies of a signal.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

STEPS = 20_000
ROWS, COLUMNS, LOOKED_UP = 20, 8, 12
IN_FLIGHT = 6


def _sparse() -> torch.Tensor:
    indices = torch.randint(ROWS, (1, LOOKED_UP))
    return torch.sparse_coo_tensor(indices, torch.randn(LOOKED_UP, COLUMNS), (ROWS, COLUMNS))


def _run(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timeout)
    for step in range(STEPS):
        for work in [dist.all_reduce(_sparse(), async_op=True) for _ in range(IN_FLIGHT)]:
            work.wait()
        if rank == 0 and step % 1000 == 0:
            print(f"step {step}", flush=True)
    dist.barrier()


def main() -> int:
    """Return how many of the two ranks died of a signal."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=_run, args=(rank, str(Path(folder) / "store"))) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    died = [process.exitcode for process in ranks if process.exitcode is not None and process.exitcode < 0]
    print(f"torch {torch.__version__}: of 2 ranks, {len(died)} died of a signal {died or ''}")
    return len(died)


if __name__ == "__main__":
    sys.exit(main())
