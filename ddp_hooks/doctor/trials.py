"""Tries policies in the steps that are watched, and then returns to plain DDP.

A quarter of the steps runs plain DDP, the next one the policy "skip_unused", and the other half "auto". The hook
produces plain DDP's gradients, so training goes on as before. All ranks switch at the end of the same step. Before
that, they exchange whether a rank cannot switch.
"""

from __future__ import annotations

from contextlib import suppress

from torch.nn.parallel import DistributedDataParallel

from ..errors import RefusedError
from ..hooks import SkipUnusedState, register
from ..serving.ddp_methods import give_way_to_other_hooks
from ..serving.disabling import is_disabled
from ..serving.modules import why_unsupported
from ..serving.service import is_served
from ..statistics import Statistics
from .recorder import Recorder
from .side_channel import SideChannel
from .timing import Trial

# By the number of quarters after which they start.
POLICIES = {1: "skip_unused", 2: "auto"}
# With fewer steps, no step is left in which "auto" does what it has decided.
LEAST_STEPS = 8


class Trials:
    """Tries policies with one module.

    Args:
        ddp: the module.
        recorder: records its steps.
        channel: connects the ranks.
        steps: the number of steps of plain DDP and of all trials together; 0 for no trials.

    Attributes:
        done: the trials that have ended.
        plain_steps: the number of steps that the recorder had recorded before the first trial; None before it.
        problem: the reason why policies could not be tried, as a clause; empty if there was none.
    """

    def __init__(self, ddp: DistributedDataParallel, recorder: Recorder, channel: SideChannel, steps: int) -> None:
        self._ddp = ddp
        self._recorder = recorder
        self._channel = channel
        self._steps = steps if channel.ranks > 1 else 0
        self._quarter = self._steps // 4 if self._steps >= LEAST_STEPS else 0
        # The last steps of each policy count: "auto" looks for gradients that are all zero from its 17th step on.
        counted_steps = self._quarter - self._quarter // 3
        self._counted_from = [end * self._quarter - counted_steps for end in (2, 4)]
        self._state: SkipUnusedState | None = None
        self._policy = ""
        self._before: Statistics | None = None  # before the steps that count; None before those
        self.done: list[Trial] = []
        self.plain_steps: int | None = None
        self.problem = ""

    def serves(self) -> bool:
        """Say whether the hook of the module is the one of a trial."""
        return self._state is not None and self._state.serves(self._ddp)

    def why_not_all(self) -> str:
        """Return why not all policies were tried, as a clause; empty if they were, or if none should be."""
        if self.problem or not self._steps or len(self.done) == len(POLICIES):
            return self.problem
        if not self._quarter:
            return f"that takes {LEAST_STEPS} steps"
        return f"the run ended before step {4 * self._quarter}; watch fewer steps to try them earlier"

    def step_ended(self, finished: int) -> None:
        """Switch to the next policy if that is due. Every rank calls this at the end of each step."""
        if not self._quarter or self.problem or finished > 4 * self._quarter:
            return
        quarter, rest = divmod(finished, self._quarter)
        if rest == 0 and quarter != 3:
            self._end_trial()
            self._switch(POLICIES.get(quarter))
        if finished in self._counted_from and self._state is not None:
            self._before = self._state.stats()

    def close(self) -> None:
        """Return to plain DDP. Every rank calls this; in the handler of an exception, it does not wait for long."""
        self._end_trial()
        if self._state is not None:
            # While DDP waits for gradients, the hook stays.
            with suppress(RefusedError):
                self._state.close()

    def _end_trial(self) -> None:
        if self._state is not None and self._before is not None and self.serves():
            counted = self._state.stats() - self._before
            if counted.steps:
                computed = [step.gradients_seconds for step in self._recorder.steps[-counted.steps :]]
                topology = self._state.topology
                assert topology is not None
                self.done.append(Trial(self._policy, counted, tuple(computed), topology))
        self._before = None

    def _switch(self, policy: str | None) -> None:
        problems = self._channel.collect(self._find_problem().encode())
        self.problem = next((problem.decode() for problem in problems if problem), "")
        if policy is None or self.problem:
            self.close()
            return
        try:
            if self._state is None:
                self._state = register(self._ddp, policy)
                self.plain_steps = len(self._recorder.steps)
                give_way_to_other_hooks(self._ddp)
            else:
                self._state.set_policy(policy)
        except RefusedError as error:  # on every rank
            self.problem = str(error)
        self._policy = policy

    def _find_problem(self) -> str:
        """Return why this rank cannot switch; empty if it can."""
        if self._recorder.is_cut_short:
            return "DDP's Reducer was made anew"
        if self._recorder.missed or self._ddp._join_config.enable:
            return "the script trains within ddp.join()"
        if self._state is not None:
            return "" if self.serves() else "the script registered another hook"
        if is_disabled():
            return "ddp_hooks is disabled"
        if is_served(self._ddp):
            return "a hook of this package is registered"
        return why_unsupported(self._ddp) or ""
