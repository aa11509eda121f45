"""Does everything around the hook run on a GPU at all, and what GPU memory does registration take?

    python benchmarks/gpu_smoke.py                              # two NCCL ranks that share one GPU
    python benchmarks/gpu_smoke.py --ranks 8 --parts memory
    python benchmarks/gpu_smoke.py --device pretend             # rehearses it without a GPU

The parts run one after another in the same ranks. The JSON file is written after each part, because a borrowed machine
may be gone at any moment. A part whose packages are not installed is left out, and the row says so. On the pretended
device of the tests (tests/pretend/), `memory` counts launches and allocations instead of bytes.

The exit status is 1 if a part failed."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tools import harness, testbed

TESTS = harness.ROOT / "tests"
NAMES = {"cuda": "gpu_smoke", "pretend": "gpu_smoke_pretend"}
BACKENDS = {"cuda": "nccl", "pretend": "cpu:gloo,pretend:pretend"}
COLLECTIVE_SECONDS = 30
LARGEST_DIFFERENCE = 1e-6
ROWS, WIDTH = 1_000, 64


class Model(nn.Module):
    """A table with few rows in use, and a head for each rank of which two are used in a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, rows: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](torch.relu(self.norm(self.table(rows)))).square().mean()


class Run:
    """One part on this rank."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        self.rank, self.device, self.options = rank, options.device, options

    def wrap(self) -> DistributedDataParallel:
        return DistributedDataParallel(Model().to(self.device), find_unused_parameters=True, bucket_cap_mb=0.02)

    def step(self, ddp: DistributedDataParallel, number: int) -> torch.Tensor:
        ddp.zero_grad()
        rows = (torch.arange(32, device=self.device) * 7 + 100 * self.rank + number) % ROWS
        loss: torch.Tensor = ddp(rows, (number + self.rank) % 2)
        loss.backward()
        return loss

    # --- the parts; each returns what its row tells

    def hook(self) -> dict[str, Any]:
        """Train under each policy as plain DDP does, freeze on the way, and rebuild."""
        import ddp_hooks

        found: dict[str, Any] = {}
        for policy in ("skip_unused", "auto", "skip_zeros"):
            plain, ours = self.wrap(), self.wrap()
            state = ddp_hooks.register(ours, policy)
            schedule = ddp_hooks.FreezeSchedule(ours, {3: "table"})
            gaps = []
            for number in range(6):
                schedule.step()
                plain.module.table.requires_grad_(number < 3)
                if number == 4:
                    ddp_hooks.rebuild(ours)
                self.step(plain, number)
                self.step(ours, number)
                for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
                    if not b.requires_grad:
                        continue
                    assert (a.grad is None) == (b.grad is None), policy
                    if a.grad is not None:
                        gaps.append(float((a.grad - b.grad).abs().max()))
            assert max(gaps) < LARGEST_DIFFERENCE, (policy, max(gaps))
            found[policy] = {"gradient_difference": max(gaps), "saved_fraction": state.stats().saved_fraction}
            state.close()
        return found

    def doctor(self) -> dict[str, Any]:
        """Diagnose with trials; times must be those of the device."""
        import ddp_hooks

        ddp = self.wrap()
        with ddp_hooks.diagnose(ddp, trial_steps=12) as diagnosis:
            for number in range(12):
                self.step(ddp, number)
        findings = diagnosis.findings
        assert findings.steps == 12
        assert [one.policy for one in findings.policies] == ["skip_unused", "auto"]
        return {one.policy: one.saved_fraction for one in findings.policies}

    def sync(self) -> dict[str, Any]:
        """Call every function of ddp_hooks.sync that runs on a device."""
        from ddp_hooks import sync

        model = Model().to(self.device)
        with torch.no_grad():
            model.heads[0].weight += self.rank
        assert not sync.verify_replicas(model).in_step
        sync.broadcast_parameters(model)
        report = sync.verify_replicas(model, raise_on_difference=True)
        model.norm.running_mean += self.rank
        sync.average_parameters(model, async_op=True).wait()
        averager = sync.PeriodicModelAverager(period=1, warmup_steps=0)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        averager.average_parameters(model.parameters())
        assert sync.verify_replicas(model).in_step
        for mode in ("broadcast", "average", "changed", "before_eval"):
            ddp = self.wrap()
            buffers = sync.BufferSync(ddp, mode)
            for number in range(4):
                self.step(ddp, number)
            ddp.eval()
            assert buffers.stats().syncs > 0, mode
        return {"hash_seconds": report.hash_seconds, "hashed_bytes": report.hashed_bytes}

    def fsdp(self) -> dict[str, Any]:
        """Train with FSDP2 as it is and registered, with the same gradients in half of the bytes."""
        import ddp_hooks.fsdp

        if self.device == "pretend":
            from ddp_hooks_testing import _pretend

            _pretend.end_memory_late(True)
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh(self.device, (self.options.ranks,))
        gradients, stats = [], None
        for is_ours in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))).to(self.device)
            for module in (*model, model):
                fully_shard(module, mesh=mesh, mp_policy=mixed)
            state = ddp_hooks.fsdp.register(model) if is_ours else None
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            found = []
            for number in range(6):
                model(torch.full((8, WIDTH), 0.1 * (number + self.rank), device=self.device)).square().mean().backward()
                found += [parameter.grad.to_local().clone() for parameter in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
            gradients.append(torch.cat([each.flatten() for each in found]).cpu())
            stats = state and state.stats()
        gap = float((gradients[0] - gradients[1]).abs().max())
        assert gap < LARGEST_DIFFERENCE, gap
        assert 2 * stats.payload_bytes == stats.dense_bytes
        return {"gradient_difference": gap, "saved_fraction": stats.saved_fraction}

    def hangs(self) -> dict[str, Any]:
        """Wait for the device after each step, as `.item()` does, and report no rank as missing."""
        import ddp_hooks

        ddp = self.wrap()
        ddp_hooks.register(ddp, "auto", report_hang_after=2)
        steps, started = 0, time.perf_counter()
        with tempfile.TemporaryFile() as errors:
            kept = os.dup(2)
            os.dup2(errors.fileno(), 2)
            try:
                # The ranks agree on the end.
                more = torch.ones((), device=self.device)
                while more.item():
                    self.step(ddp, steps).item()
                    steps += 1
                    more.fill_(time.perf_counter() - started < self.options.hang_seconds)
                    dist.broadcast(more, 0)
            finally:
                os.dup2(kept, 2)
                os.close(kept)
            errors.seek(0)
            said = errors.read().decode()
        assert "ddp_hooks:" not in said, said
        return {"steps": steps}

    def lightning(self) -> dict[str, Any]:
        """Train with the callback; each rank is a node with one device, because both share it."""
        from lightning.pytorch import LightningModule, Trainer
        from torch.utils.data import DataLoader

        from ddp_hooks.integrations.lightning import SkipUnusedCallback

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = Model()

            def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
                loss: torch.Tensor = self.model(batch, batch_idx % 2)
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        where: dict[str, Any] = {"accelerator": "gpu", "strategy": "ddp_find_unused_parameters_true"}
        if self.device == "pretend":
            from test_integrations_pretend import PretendedAccelerator, PretendedStrategy

            strategy = PretendedStrategy(find_unused_parameters=True)
            where = {"accelerator": PretendedAccelerator(), "strategy": strategy}
        callback = SkipUnusedCallback("skip_unused")
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        ranks = dist.get_world_size()
        trainer = Trainer(devices=1, num_nodes=ranks, max_epochs=1, callbacks=[callback], **where, **quiet)
        trainer.fit(Module(), DataLoader(torch.arange(32 * 4 * ranks) % ROWS, batch_size=32))
        assert callback.state is not None
        return {"saved_fraction": callback.state.stats().saved_fraction}

    def transformers(self) -> dict[str, Any]:
        """Train with the callback in transformers' Trainer."""
        from trainers import Items, make_model
        from transformers import Trainer, TrainingArguments

        from ddp_hooks.integrations.transformers import SkipUnusedCallback

        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, max_steps=4, per_device_train_batch_size=1, report_to="none", disable_tqdm=True,
                save_strategy="no", remove_unused_columns=False, ddp_find_unused_parameters=True,
            )  # fmt: skip
            trainer = Trainer(make_model(), arguments, train_dataset=Items())
            callback = SkipUnusedCallback(trainer)
            trainer.add_callback(callback)
            trainer.train()
        assert callback.state is not None
        assert next(trainer.model.parameters()).device.type == self.device
        return {"saved_fraction": callback.state.stats().saved_fraction}

    def memory(self) -> dict[str, Any]:
        """Measure around wrapping, registration and three steps."""
        import ddp_hooks

        def taken() -> dict[str, int]:
            if self.device == "pretend":
                from ddp_hooks_testing import _pretend

                return {name: _pretend.counts()[name] for name in ("launches", "allocations", "collectives")}
            torch.cuda.synchronize()
            dist.barrier()
            free, total = torch.cuda.mem_get_info()
            return {"used_bytes_of_all_ranks": total - free, "allocated_bytes": torch.cuda.memory_allocated()}

        found = {"before": taken()}
        ddp = self.wrap()
        self.step(ddp, 0)
        found["wrapped"] = taken()
        state = ddp_hooks.register(ddp, "auto")
        found["registered"] = taken()
        for number in range(3):
            self.step(ddp, number)
        found["trained"] = taken()
        state.close()
        return found


PARTS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "hook": Run.hook,
    "doctor": Run.doctor,
    "sync": Run.sync,
    "fsdp": Run.fsdp,
    "memory": Run.memory,
    "lightning": Run.lightning,
    "transformers": Run.transformers,
    "hangs": Run.hangs,
}


def why_left_out(part: str, device: str) -> str | None:
    """Say why a part cannot run here, or None."""
    if part in ("lightning", "transformers") and importlib.util.find_spec(part) is None:
        return f"{part} is not installed"
    if part == "transformers" and device == "pretend":
        return "transformers chooses the device itself, and does not know this one"
    if part == "fsdp" and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return f"ddp_hooks.fsdp refuses torch {torch.__version__}"
    return None


def run_rank(rank: int, options: argparse.Namespace, port: int, header: dict[str, Any]) -> None:
    """Run the parts on one rank; rank 0 writes."""
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": "0", "GROUP_RANK": str(rank), "LOCAL_WORLD_SIZE": "1"},
        WORLD_SIZE=str(options.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="smoke",
    )  # fmt: skip
    sys.path[1:1] = [str(TESTS), *(str(path) for path in TESTS.iterdir() if path.is_dir() and path.name[0] not in "._")]
    import gpu

    os.environ.update(gpu.environment(rank))
    if options.device == "cuda":
        torch.cuda.set_device(0)
    else:
        import pretend  # noqa: F401, makes torch know the device
    torch.set_num_threads(1)
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    dist.init_process_group(BACKENDS[options.device], rank=rank, world_size=options.ranks, timeout=timeout)
    rows: list[dict[str, Any]] = []
    failed = False
    for part in options.parts:
        started = time.perf_counter()
        row: dict[str, Any] = {"part": part, "ranks": options.ranks, "device": options.device}
        if why := why_left_out(part, options.device):
            row["left_out"] = why
        else:
            try:
                row |= PARTS[part](Run(rank, options))
            except Exception as error:  # the other parts say something, too
                row["failed"] = f"{type(error).__name__}: {error}"[:2000]
                failed = True
        row["seconds"] = round(time.perf_counter() - started, 1)
        rows.append(row)
        print(f"rank {rank}: {row}", flush=True)
        if rank == 0:
            worked = [each["part"] for each in rows if not {"failed", "left_out"} & each.keys()]
            sentence = f"On {options.ranks} ranks that share a {options.device} device, these ran: {', '.join(worked)}."
            result = {"benchmark": "gpu_smoke", "header": header, "rows": rows, "sentence": sentence}
            harness.write(options.name, result, options.out)
    dist.destroy_process_group()
    sys.exit(int(failed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(BACKENDS), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--hang-seconds", type=float, default=30.0, help="how long `hangs` trains")
    parser.add_argument("--name", help="of the JSON")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for the JSON")
    options = parser.parse_args()
    options.name = options.name or NAMES[options.device]
    header = harness.environment_header(sys.argv, options.ranks, [], backend=BACKENDS[options.device])
    # Not mp.spawn, which ends the others when one rank fails, before rank 0 has written what it saw.
    arguments = (options, testbed.free_port(), header)
    ranks = [
        mp.get_context("spawn").Process(target=run_rank, args=(rank, *arguments), daemon=True)
        for rank in range(options.ranks)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return int(any(each.exitcode != 0 for each in ranks))


if __name__ == "__main__":
    sys.exit(main())
