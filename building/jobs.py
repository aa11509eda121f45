"""Runs compilers: several at once, and only for what has changed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path


class Failure(Exception):
    """A command failed; holds what it printed."""


@dataclass(frozen=True, slots=True)
class Job:
    """Makes a file. What it depends on besides ``inputs``, the compiler writes into a file beside it (-MMD)."""

    output: Path
    inputs: Sequence[Path]
    command: tuple[str, ...]
    needs: Sequence[Job] = ()
    # Instead of running the command, which then only says what is done.
    act: Callable[[], None] | None = field(default=None, compare=False)
    # Where to note the command; beside the output, unless that goes into a package.
    log_folder: Path | None = None

    @property
    def log(self) -> Path:
        """Return where the command of the last run stands."""
        return (self.log_folder or self.output.parent) / f"{self.output.name}.command"

    @property
    def depfile(self) -> Path:
        """Return where the compiler lists headers."""
        return self.output.with_name(f"{self.output.name}.d")

    def is_done(self) -> bool:
        """Say whether the output was made by this command from inputs that have not changed since."""
        if not self.output.exists() or not self.log.exists() or self.log.read_text() != "\n".join(self.command):
            return False
        made = self.output.stat().st_mtime_ns
        inputs = [*self.inputs, *(job.output for job in self.needs), *self._read_depfile()]
        return all(path.exists() and path.stat().st_mtime_ns <= made for path in inputs)

    def run(self) -> None:
        """Make the output, unless it is done."""
        if self.is_done():
            return
        self.log.unlink(missing_ok=True)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        if self.act is not None:
            self.act()
        else:
            done = subprocess.run(self.command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise Failure(f"{' '.join(self.command)}\n{done.stdout}{done.stderr}")
            print(done.stdout + done.stderr, end="", flush=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("\n".join(self.command))

    def _read_depfile(self) -> list[Path]:
        if not self.depfile.exists():
            return []
        words = self.depfile.read_text().replace("\\\n", " ").split()
        return [Path(word) for word in words if not word.endswith(":")]


def run_all(jobs: Sequence[Job]) -> None:
    """Run jobs, each after what it needs: as many at once as MAX_JOBS says, or there are processors."""
    futures: dict[Path, Future[None]] = {}

    def run_after_needs(job: Job) -> None:
        for need in job.needs:
            futures[need.output].result()
        job.run()

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", 0)) or len(os.sched_getaffinity(0))) as pool:

        def submit(job: Job) -> None:
            # What it needs stands before it in the queue, so no job waits for one that nobody runs.
            for need in job.needs:
                submit(need)
            if job.output not in futures:
                futures[job.output] = pool.submit(run_after_needs, job)

        for job in jobs:
            submit(job)
        try:
            for future in futures.values():
                future.result()
        except BaseException:
            for future in futures.values():
                future.cancel()
            raise
