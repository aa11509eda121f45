"""A program: what is trained, how DDP and the hook are set up, and what is done then. Plain data throughout.

A program may be cut down in any place and still means something: what names a layer or a parameter that is not there
names nothing, and whether plain DDP can be its own oracle is found out from what is left (see oracle.py). Everything
that may differ between ranks is a list with one entry for each rank.

Layers are dictionaries with `id` (a number that nothing else has), `kind` and `dtype`, and what the kind needs.
Operations are dictionaries with `do`:

    pass        forward and backward: `used` (layer ids by rank), `sync` (or under no_sync), `declare` ("block" or
                "once": how to tell a state without a search what is left out), `declare_used` (declare what is used,
                too), `factors` (layer id to a factor for its gradient, by rank), `idle` (add 0 * every parameter to
                the loss), `penalty` (the loss uses parameters directly), `forwards` (1 or 2 into one loss), `batch`,
                `autocast` (the dtype of the forward pass), `odd` (gradients that are exchanged, see odd.py)
    fail        a forward and a backward that raises `at` the "loss" or the "outputs", before the first gradient
    update      clip, optimizer step (unless `skip`), zero_grad: `zero` is "none", "zeros" or "keep"
    freeze      `what`: patterns of parameter names by rank; `how`: "flag" or "package"; `keep` the gradients
    unfreeze        the same
    hook        `kind` "tensor" or "accumulate" on parameter `on`, or "forward" on DDP, which multiplies with
                `multipliers`, by rank
    register    take the hook off and register it anew
    rebuild     make the Reducer anew; in ddp.join() between two steps, when every rank has had the first
    policy, broadcast, average, verify, checkpoint, evaluate
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tuned import with_settings

import ddp_hooks

Layer = dict[str, Any]
Operation = dict[str, Any]


@dataclass
class Options:
    """How DDP, the hook and the optimizer are set up."""

    find_unused_parameters: bool = True
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    bucket_cap_mb: float = 25.0
    native: bool = True
    # The name of a preset, or settings of a Policy and its Tuning, with its name among them.
    policy: str | dict[str, Any] = "skip_unused"
    # Patterns of parameters that are frozen before DDP is built.
    frozen_when_wrapped: list[str] = field(default_factory=list)
    optimizer: str = "sgd"
    # The mode of a BufferSync.
    buffer_sync: str | None = None
    # After how many updates each rank runs out of data, in ddp.join().
    join: list[int] | None = None
    divide_by_initial_world_size: bool = True
    # Whether torch fills what it allocates, so that what is read before it is written shows.
    fills_memory: bool = False
    # How the module returns its output: "tensor", "tuple" or "dict".
    output: str = "tensor"
    # Where the module lies: "cpu"; "cuda", one GPU for all ranks; or "pretend" (see tests/pretend/), where the
    # program's seed says what runs when.
    device: str = "cpu"
    # On a device, which streams are used: the "default" one throughout; one for "all"; the default one when the module
    # is wrapped and another when it is "trained"; or "layers": for all, and each layer has one of its own.
    streams: str = "default"
    # Which ranks share a host, a letter for each rank; None where each has one of its own.
    hosts: str | None = None
    # On a device, what carries the hook's collectives: a group that puts them on a "stream", as NCCL, or one that
    # copies to the "host", as gloo.
    group: str = "stream"


@dataclass
class Program:
    seed: int
    ranks: int
    layers: list[Layer] = field(default_factory=list)
    options: Options = field(default_factory=Options)
    operations: list[Operation] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Program:
        values = json.loads(text)
        return cls(**{**values, "options": Options(**values["options"])})

    def copy(self) -> Program:
        return Program.from_json(self.to_json())

    def __str__(self) -> str:
        lines = [f"program of seed {self.seed} on {self.ranks} ranks"]
        defaults = asdict(Options())
        changed = {name: value for name, value in asdict(self.options).items() if value != defaults[name]}
        lines += [f"  {name}: {value}" for name, value in changed.items()]
        for layer in self.layers:
            rest = {name: value for name, value in layer.items() if name not in ("id", "kind")}
            lines.append(f"  layer {layer['id']}: {layer['kind']} {_readable(rest)}")
        for index, operation in enumerate(self.operations):
            rest = {name: value for name, value in operation.items() if name != "do"}
            lines.append(f"  {index:3}. {operation['do']} {_readable(rest)}")
        return "\n".join(lines)


def _readable(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items() if value not in (None, False, [], {}))


def policy_of(value: str | dict[str, Any]) -> ddp_hooks.Policy:
    """Return the policy that a program names or describes."""
    if isinstance(value, str):
        return ddp_hooks.policies.PRESETS[value]
    return with_settings(ddp_hooks.Policy(value["name"]), **value)


def settings_of(value: str | dict[str, Any]) -> dict[str, Any]:
    """Return the same policy as settings: its name, and what differs from the defaults."""
    policy, plain = policy_of(value), with_settings(ddp_hooks.Policy(""))
    return {
        setting.name: getattr(ours, setting.name)
        for ours, defaults in ((policy, plain), (policy.tuning, plain.tuning))
        for setting in fields(ours)
        if setting.name != "tuning" and getattr(ours, setting.name) != getattr(defaults, setting.name)
    }
