"""A random program from a seed; the same one from the same seed, for any number of ranks its own."""

from __future__ import annotations

import math
import random
from dataclasses import fields
from typing import Any

import ddp_hooks

from .odd import KINDS, SPOIL_WEIGHTS
from .program import Layer, Operation, Program, settings_of

# Only one rank's, or nobody's, gradients are special: that is where something might be skipped.
_FACTORS = ("nan", "inf", "-inf", "0.0", "-0.0", "1e-40", "-1e-42", "1e-3", "2.0")
# Whether policies say how gradients are coded.
HAS_CODED = "coded" in {setting.name for setting in fields(ddp_hooks.Policy)}
_MAY_SPOIL_WEIGHTS = ("nan", "inf", "-inf")


def generate(seed: int, ranks: int, device: str = "cpu") -> Program:
    """Return the program of that seed; on another device without the layers that do not run there."""
    program = _Generator(seed, ranks).generate()
    options = program.options
    options.device = device
    if device != "cpu":
        # Gradients on a device are not coded, and whoever insists is refused.
        for policy in (options.policy, *(operation.get("policy") for operation in program.operations)):
            if isinstance(policy, dict) and policy.get("coded") == "on":
                policy["coded"] = "auto"
        program.layers = [layer for layer in program.layers if _runs_on_devices(layer)]
        draw = random.Random(f"streams of {seed} on {ranks}")
        options.streams = draw.choice(["default", "all", "trained", "layers"])
        options.group = draw.choices(["stream", "host"], [3, 1])[0]
        # There all that these programs train would be held until the last bucket.
        for described in (vars(options), *program.operations):
            if described.get("policy") not in (None, "allreduce"):
                described["policy"] = {"opening_bytes": 0, **settings_of(described["policy"])}
    if device == "cuda":
        # CUDA adds up a norm in an order that depends on how gradients are aligned, and the hook leaves some elsewhere.
        for operation in program.operations:
            operation.pop("clip", None)
    if device == "cuda" and any(layer.get("batch") for layer in program.layers if layer["kind"] == "norm"):
        # cuDNN's backward looks at the running statistics, which DDP broadcasts before the second forward pass.
        for operation in program.operations:
            operation.pop("forwards", None)
    return program


def _runs_on_devices(layer: Layer) -> bool:
    # Torch has no convolution for a device of somebody's own. The pretended one goes by what torch says of meta
    # tensors, which is wrong for a bag's backward pass, and has no sparse tensors.
    return layer["kind"] not in ("convolution", "bag") and not layer.get("sparse")


class _Generator:
    def __init__(self, seed: int, ranks: int) -> None:
        self.random = random.Random(f"{seed} on {ranks}")
        # By numbers of their own, so that what seeds found before these were there stays what it was.
        self.transports = random.Random(f"transports of {seed} on {ranks}")
        self.hosts = random.Random(f"hosts of {seed} on {ranks}")
        self.closings = random.Random(f"closings of {seed} on {ranks}")
        self.lookups = random.Random(f"lookups of {seed} on {ranks}")
        self.openings = random.Random(f"openings of {seed} on {ranks}")
        self.joins = random.Random(f"joins of {seed} on {ranks}")
        self.numbers = random.Random(f"widths of {seed} on {ranks}")
        self.codes = random.Random(f"codes of {seed} on {ranks}")
        self.ranks = ranks
        self.program = Program(seed, ranks)
        self.options = self.program.options
        self.batches = seed % 1000 * 100
        self.declares = False
        self.freezes = False
        self.needs_skip_unused = False
        self.rebuilds_in_join = False
        self.hooks_tensors = False
        self.always: list[int] = []
        self.static_use: list[list[int]] = []
        self.reduced = 0
        # Whether there are parameters that plain DDP does not know, or may come to be.
        self.may_be_unmanaged = False
        self.freezable: list[str] = []
        self.autocast: str | None = None
        self.has_odd_gradients = False

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def generate(self) -> Program:
        self._make_layers()
        self._make_options()
        for _ in range(self.random.randint(2, 6)):
            self._make_round()
        if self.rebuilds_in_join:
            self._freeze_for_good()
        return self.program

    # --- the model

    def _make_layers(self) -> None:
        layers = self.program.layers
        for number in range(self.random.randint(1, 7)):
            kind = self.random.choices(
                ["linear", "square", "embedding", "convolution", "norm", "loose", "checkpointed", "bag", "experts"],
                [6, 3, 4, 2, 2, 3, 1, 1.5, 3],
            )[0]
            layers.append({"id": number, "kind": kind, **getattr(self, f"_{kind}")(layers)})
        self.always = [layer["id"] for layer in layers if layer.get("sparse")]

    def _dtype(self, *, halves: bool = True) -> str:
        return self.random.choices(
            ["float32", "float64", "bfloat16", "float16"], [6, 2, 1 if halves else 0, 1 if halves else 0]
        )[0]

    def _linear(self, layers: list[Layer]) -> dict[str, Any]:
        dtype = "complex64" if self.chance(0.08) else self._dtype()
        width = self.random.choice([1, 3, 8, 17, 64, 500])
        return {"dtype": dtype, "width": width, "bias": self.chance(0.7), "relu": self.chance(0.4)}

    _checkpointed = _linear

    def _square(self, layers: list[Layer]) -> dict[str, Any]:
        others = [layer for layer in layers if layer["kind"] == "square"]
        if others and self.chance(0.5):
            other = self.random.choice(others)
            return {"dtype": other["dtype"], "tied_to": other["id"], "bias": self.chance(0.5)}
        return {"dtype": self._dtype(), "bias": self.chance(0.7)}

    def _embedding(self, layers: list[Layer]) -> dict[str, Any]:
        sparse = self.chance(0.3)
        layer = {"dtype": "float32" if sparse else self._dtype(), "sparse": sparse, **self._table()}
        if not sparse:
            layer["use"] = self.random.choices(["once", "twice", "head"], [5, 2, 2])[0]
            layer["by_frequency"] = self.chance(0.1)
            layer["checkpointed"] = self.lookups.random() < 0.15
        return {**layer, "padding": self.chance(0.2)}

    def _table(self) -> dict[str, Any]:
        return {
            "rows": self.random.choice([1, 2, 11, 11, 64, 65, 300]),
            "tokens": self.random.choice(["own", "shared", "both"]),
        }

    def _bag(self, layers: list[Layer]) -> dict[str, Any]:
        mode = self.random.choice(["mean", "sum", "max"])
        checkpointed = self.lookups.random() < 0.15
        return {"dtype": self._dtype(halves=False), "mode": mode, "checkpointed": checkpointed, **self._table()}

    def _experts(self, layers: list[Layer]) -> dict[str, Any]:
        return {
            "dtype": "complex64" if self.chance(0.08) else self._dtype(),
            "experts": self.random.choice([1, 3, 16, 70]),
            "width": self.random.choice([1, 3, 12, 32]),
            "used": self.random.randint(1, 3),
            "tokens": self.random.choice(["own", "shared", "both"]),
            "gathers": self.chance(0.4),
        }

    def _convolution(self, layers: list[Layer]) -> dict[str, Any]:
        filters, prunes = self.random.choice([(2, False), (2, True), (20, True)])
        last = self.chance(0.5)
        return {"dtype": self._dtype(halves=False), "channels_last": last, "filters": filters, "prunes": prunes}

    def _norm(self, layers: list[Layer]) -> dict[str, Any]:
        return {"dtype": "float32", "batch": self.chance(0.7), "affine": self.chance(0.8)}

    def _loose(self, layers: list[Layer]) -> dict[str, Any]:
        shapes = [[], [0, 4], [1], [1, 1], [5], [7, 1, 2], [1000], [300_000]]
        shape = self.random.choices(shapes, [3, 2, 1, 1, 2, 2, 2, 0.5])[0]
        return {"dtype": self._dtype(), "shape": shape, "rows": self.random.choice([None, None, 1, 3])}

    # --- the options

    def _make_options(self) -> None:
        options, layers = self.options, self.program.layers
        sparse = any(layer.get("sparse") for layer in layers)
        flavour = self.random.choices(["search", "declared", "all used", "static"], [45, 20, 20, 15])[0]
        options.find_unused_parameters = flavour == "search"
        options.static_graph = flavour == "static"
        self.declares = flavour == "declared"
        self.freezes = self.chance(0.5)
        # A policy without skip_unused says of itself that it writes the .grad of what is frozen or declared.
        self.needs_skip_unused = (flavour != "search" and (self.declares or self.freezes)) or self.chance(0.5)
        options.gradient_as_bucket_view = self.chance(0.4)
        options.broadcast_buffers = self.chance(0.7)
        options.bucket_cap_mb = self.random.choice([1e-5, 1e-4, 1e-3, 1e-2, 1, 25])
        options.native = self.chance(0.6)
        options.policy = self._policy()
        options.hosts = self._hosts()
        options.optimizer = "sgd" if sparse else self.random.choice(["sgd", "momentum", "adamw"])
        options.output = self.random.choice(["tensor", "tensor", "tuple", "dict"])
        if options.broadcast_buffers and self.chance(0.2):
            options.buffer_sync = self.random.choice(["broadcast", "changed", "average", "before_eval"])
        # The same without a search, where it is the oracle alone that searches: the hook leaves what nobody uses alone.
        may_join = flavour == "search" or not (self.declares or self.freezes)
        if flavour != "static" and not sparse and may_join and self.chance(0.1):
            options.join = [self.random.randint(1, 6) for _ in range(self.ranks)]
            options.divide_by_initial_world_size = self.chance(0.6)
            self._rebuild_in_join(searches=flavour == "search")
        self.hooks_tensors = self.chance(0.4)
        patterns = [f"layers.{layer['kind']}{layer['id']}" for layer in layers if not layer.get("sparse")]
        self.freezable = [*patterns, "head.bias"]
        # While a rank has joined, plain DDP makes a .grad of zeros for whatever that rank used last. The hook does the
        # same for what DDP knows, and not for what is unmanaged, so there the oracle says nothing.
        if self.freezes and flavour != "static" and options.join is None and self.chance(0.4):
            options.frozen_when_wrapped = self.random.sample(patterns, min(len(patterns), self.random.randint(1, 2)))
        if self.numbers.random() < 0.35:
            self.autocast = self.numbers.choice(["bfloat16", "bfloat16", "float16"])
        self.has_odd_gradients = self.numbers.random() < 0.3
        if flavour == "static":
            self.static_use = [self._some_layers() for _ in range(self.ranks)]

    def _rebuild_in_join(self, *, searches: bool) -> None:
        """Have a rank join when the Reducer has been made anew since its last step; only a search needs to know then.

        What it says of that step lies in the Reducer. Sometimes what the Reducer has not written is made visible.
        """
        self.rebuilds_in_join = searches and self.freezes and self.joins.random() < 0.6
        if not self.rebuilds_in_join:
            return
        self.options.fills_memory = self.joins.random() < 0.5
        by_itself = {"rebuild_after": self.joins.choice([0, 1, 2])}
        if not self.needs_skip_unused and self.joins.random() < 0.7:
            self.options.policy = {"name": "allreduce", "skip_unused": False, **by_itself}
        elif self.joins.random() < 0.5:
            self.options.policy = {**settings_of(self.options.policy), **by_itself}

    def _rebuild_between_steps(self) -> None:
        updates = sum(operation["do"] == "update" for operation in self.program.operations)
        join = self.options.join
        assert join is not None
        if updates == 0 and self.joins.random() < 0.7:
            self._add("freeze", what=[self.joins.sample(self.freezable, 1)] * self.ranks, how="flag", keep=True)
        # Before anything else is frozen, which the last step may have used.
        if self.joins.random() < (0.6 if updates == min(join) else 0.1):
            self._add("rebuild", search=None)

    def _freeze_for_good(self) -> None:
        """Leave out what unfreezes, and what freezes within a step, as for `frozen_when_wrapped`: a rebuild forgets it.

        Plain DDP makes a .grad of zeros for what is frozen after its last use, and for what was unmanaged.
        """
        kept: list[Operation] = []
        within = False
        for operation in self.program.operations:
            within = operation["do"] != "update" and (within or operation["do"] == "pass")
            if operation["do"] != "unfreeze" and not (within and operation["do"] == "freeze"):
                kept.append(operation)
        self.program.operations = kept

    def _hosts(self) -> str | None:
        ranks = self.program.ranks
        # Where hosts can have as many ranks as each other, these add up what they have first.
        sizes = [size for size in range(2, ranks) if ranks % size == 0]
        if sizes and self.hosts.random() < 0.7:
            letters = list("abcdefgh"[: ranks // self.hosts.choice(sizes)] * ranks)[:ranks]
            if self.hosts.random() < 0.7:
                letters.sort()
            return "".join(letters)
        if self.hosts.random() < 0.2:
            return "".join(self.hosts.choice("ab") for _ in range(ranks))
        return None

    def _policy(self) -> str | dict[str, Any]:
        policy = self._policy_but_for_openings()
        if policy == "allreduce" or self.openings.random() < 0.6:
            return policy
        return {**settings_of(policy), "opening_bytes": self.openings.choice([100, 1000, 1 << 40])}

    def _policy_but_for_openings(self) -> str | dict[str, Any]:
        policy = self._policy_but_for_coding()
        if not HAS_CODED or policy == "allreduce" or self.codes.random() < 0.4:
            return policy
        settings = settings_of(policy)
        if not settings.get("skip_unused", True):
            return policy
        settings["coded"] = self.codes.choice(["on", "on", "on", "auto", "off"])
        # What everybody uses then travels directly, too: of these layers a message for each number takes too long.
        many = any(layer.get("experts", 1) * layer.get("width", 0) > 100 for layer in self.program.layers)
        if settings["coded"] != "off" and many:
            settings["segment_bytes"] = max(settings.get("segment_bytes", 1000), 1000)
        # Presets divide nothing that is as small as what is trained here, and wait long before they try.
        if settings["coded"] == "auto":
            settings = {"first_pause_steps": 1, "longest_pause_steps": self.codes.choice([1, 2]), **settings}
        if self.codes.random() < 0.6:
            lengths = {
                "min_divided_bytes": 0,
                "min_unit_bytes": self.codes.choice([1, 16, 64]),
                "max_unit_bytes": 100,
            }
            settings = {**lengths, **settings}
        return settings

    def _policy_but_for_coding(self) -> str | dict[str, Any]:
        policy = self._policy_but_for_transports()
        if policy == "allreduce" or self.transports.random() < 0.3:
            return policy
        # Presets all-reduce what is as small as what is trained here. A message for each number takes too long of many.
        large = any(math.prod(layer.get("shape", [0])) > 100_000 for layer in self.program.layers)
        direct = {
            "min_direct_bytes": self.transports.choice([0, 0, 0, 1000]),
            "segment_bytes": max(self.transports.choice([1, 40, 1000, 1 << 20]), 10_000 * large),
            "owners": self.transports.random() < 0.7,
            "min_owner_saving": self.transports.choice([0.0, 0.15]),
        }
        return {**settings_of(policy), **direct}

    def _policy_but_for_transports(self) -> str | dict[str, Any]:
        policy = self._policy_but_for_units()
        # Presets divide nothing that is as small as what is trained here.
        if policy == "allreduce" or not self.chance(0.6):
            return policy
        settings = settings_of(policy)
        if not settings.get("skip_unused", True):
            return policy
        units: dict[str, Any] = {
            "name": "units",
            "skip_zero_rows": self.random.choice(["on", "on", "adaptive"]),
            "min_divided_bytes": self.random.choice([0, 1, 64, 256]),
            "min_unit_bytes": self.random.choice([1, 1, 4, 8, 16, 64]),
            "max_unit_bytes": self.random.choice([8, 32, 100, 1024, 4096]),
        }
        if units["skip_zero_rows"] == "adaptive":
            first = self.random.choice([1, 1, 2])
            units |= {"first_pause_steps": first, "longest_pause_steps": first * self.random.choice([1, 2])}
            units["min_zero_fraction"] = self.random.choice([0.0, 0.05, 0.5])
        if self.chance(0.5):
            units["in_place_bytes"] = self.random.choice([0, 16, 96, 1024])
            units["pack_bytes"] = self.random.choice([0, 1, 64, 1024])
        return {**settings, **units}

    def _policy_but_for_units(self) -> str | dict[str, Any]:
        choice = self.random.randint(0, 9)
        if choice < 6:
            presets = ["skip_unused", "skip_unused", "skip_zeros", "auto"]
            return self.random.choice(presets if self.needs_skip_unused else ["allreduce", *presets])
        eager = {"skip_zeros": "adaptive", "first_pause_steps": 1, "longest_pause_steps": 2, "hold_steps": 1}
        if choice == 6:
            return {"name": "eager_auto", **eager}
        policy = {
            "name": "random",
            "skip_unused": self.needs_skip_unused or self.chance(0.6),
            "in_place_bytes": self.random.choice([0, 64, 1024, 1 << 20]),
            "pack_bytes": self.random.choice([0, 256, 4096, 4 << 20]),
            "gap_fraction": self.random.choice([0.0, 1 / 128, 0.5, 1.0]),
            "skip_zeros": self.random.choice(["off", "on"]),
            # Half precision that may become unmanaged is excluded above only for what is frozen when DDP is built.
            "rebuild_after": self.random.choice([0, 0, 1, 2]),
        }
        return {**policy, **(eager if self.chance(0.3) else {})}

    # --- what is done

    def _add(self, do: str, **values: Any) -> None:
        self.program.operations.append({"do": do, **values})

    def _some_layers(self) -> list[int]:
        share = self.random.choice([0.3, 0.6, 0.9])
        used = [layer["id"] for layer in self.program.layers if layer["id"] in self.always or self.chance(share)]
        if self.chance(0.3):
            self.random.shuffle(used)
        if used and self.chance(0.15):
            used.append(self.random.choice([i for i in used if i not in self.always] or used))
        return used

    def _use(self) -> list[list[int]]:
        if self.options.static_graph:
            return self.static_use
        everything = [layer["id"] for layer in self.program.layers]
        if not (self.options.find_unused_parameters or self.declares):
            return [everything] * self.ranks
        if self.chance(0.3):
            return [self._some_layers()] * self.ranks
        return [self._some_layers() for _ in range(self.ranks)]

    def _pass(self, sync: bool) -> None:
        options = self.options
        used = self._use()
        self.batches += 2
        operation: Operation = {"do": "pass", "sync": sync, "used": used, "batch": self.batches}
        if self.declares or self.chance(0.1):
            operation["declare"] = self.random.choice(["block", "once"])
            operation["declare_used"] = self.chance(0.3)
        if self.chance(0.25) and self.program.layers:
            candidates = [layer["id"] for layer in self.program.layers if not layer.get("sparse")]
            chosen = self.random.sample(candidates, min(len(candidates), self.random.randint(1, 2)))
            operation["factors"] = {str(index): self._factor() for index in chosen}
            # Plain DDP's product of an infinite complex number and 1/n is NaN; see Rounding in architecture.md.
            for layer in self.program.layers:
                if str(layer.get("dtype")).startswith("complex") and str(layer["id"]) in operation["factors"]:
                    values = operation["factors"][str(layer["id"])]
                    operation["factors"][str(layer["id"])] = ["2.0" if "inf" in value else value for value in values]
        if not options.find_unused_parameters and self.chance(0.15):
            operation["idle"] = True
        if not options.static_graph and self.chance(0.1):
            operation["penalty"] = True
        # Each forward tells the ranks that have joined of one more pass.
        if not options.static_graph and options.join is None and self.chance(0.08):
            operation["forwards"] = 2
            operation["used"] = [used[0]] * self.ranks
        # Now and then without, so that gradients come to hold more bits and fewer again.
        if self.autocast is not None and self.numbers.random() < 0.85:
            operation["autocast"] = self.autocast
        if self.has_odd_gradients and self.numbers.random() < 0.6:
            operation["odd"] = [self._odd() for _ in range(self.numbers.randint(1, 3))]
        self.program.operations.append(operation)

    def _odd(self) -> dict[str, Any]:
        exact = [kind for kind in KINDS if kind not in SPOIL_WEIGHTS]
        kinds = exact if self.numbers.random() < 0.6 else list(KINDS)
        alike = self.numbers.choice(kinds)
        others = [None, *kinds]
        by_rank = [alike if self.numbers.random() < 0.7 else self.numbers.choice(others) for _ in range(self.ranks)]
        patterns = [pattern for pattern in self.freezable if not pattern.startswith("layers.norm")]
        # Plain DDP's product of an infinite complex number and 1/n is NaN; see Rounding in architecture.md.
        of_complex = {
            f"layers.{layer['kind']}{layer['id']}"
            for layer in self.program.layers
            if str(layer.get("dtype")).startswith("complex")
        }
        on = self.numbers.choice([pattern for pattern in patterns if pattern not in of_complex]).replace(".bias", "")
        return {
            "on": self._parameter_in(on, self.numbers),
            "kinds": by_rank,
            "where": self.numbers.choice(["all", "used"]),
            "via": self.numbers.choice(["hook", "function"]),
        }

    def _factor(self) -> list[str]:
        if self.chance(0.4):
            return [self.random.choice(["0.0", "-0.0"]) for _ in range(self.ranks)]
        special = [self.random.choice(_FACTORS) for _ in range(self.ranks)]
        ordinary = self.random.choice(["1.0", "0.0"])
        return [factor if self.chance(0.5) else ordinary for factor in special]

    def _make_round(self) -> None:
        """Some passes that are accumulated, one that is reduced, and an update."""
        first = len(self.program.operations)
        self._between_steps()
        micro_steps = self.random.choice([0, 0, 0, 1, 2])
        if self.options.static_graph and self.reduced == 0:
            micro_steps = 0
        for _ in range(micro_steps):
            self._pass(sync=False)
            if self.chance(0.1):
                # Plain DDP does not take it when an accumulated gradient is dropped.
                self._freeze_or_unfreeze(keep=True)
            self._register_anew()
        if self._may_fail() and self.chance(0.08):
            self._add("fail", at=self.random.choice(["loss", "outputs"]))
        self._pass(sync=True)
        self.reduced += 1
        factors = [
            factor
            for operation in self.program.operations[first:]
            for by_rank in operation.get("factors", {}).values()
            for factor in by_rank
        ]
        kinds = {
            kind
            for operation in self.program.operations[first:]
            for odd in operation.get("odd", ())
            for kind in odd["kinds"]
        }
        spoilt = any(factor in _MAY_SPOIL_WEIGHTS for factor in factors) or not kinds.isdisjoint(SPOIL_WEIGHTS)
        # Plain DDP averages gradients that nobody used in this step, and the hook leaves them alone. One sees it while
        # a rank has joined, which brings zeros, and where the gradient is a view of its bucket and so small that
        # halving it rounds.
        halves = any(layer.get("dtype") == "float16" for layer in self.program.layers)
        averaged = self.options.join is not None or (halves and self.options.gradient_as_bucket_view)
        zero = self.random.choices(["none", "zeros", "keep"], [5, 3, 0 if spoilt or averaged else 1])[0]
        sparse = any(layer.get("sparse") for layer in self.program.layers)
        clip = 1.0 if not spoilt and not sparse and self.chance(0.2) else None
        self._add("update", clip=clip, skip=spoilt, zero=zero)

    def _may_fail(self) -> bool:
        options = self.options
        return not (options.static_graph or options.join is not None)

    def _between_steps(self) -> None:
        if self.rebuilds_in_join:
            self._rebuild_between_steps()
        if self.freezes and self.chance(0.5) and not (self.options.static_graph and self.reduced == 0):
            self._freeze_or_unfreeze()
        if self.hooks_tensors and self.chance(0.4):
            kind = self.random.choice(["tensor", "accumulate", "forward"])
            candidates = [p for p in self.freezable if not p.startswith("layers.norm")]
            on = f"{self.random.choice(candidates)}".replace("head.bias", "head")
            # A negative one makes -0.0 of what no row of a batch used, which another rank has as +0.0.
            factors = [self.random.choice([0.5, 0.0, -0.0, -2.0, -2.0]) for _ in range(self.ranks)]
            alike = self.chance(0.4)
            multipliers = factors[:1] * self.ranks if alike else factors
            self._add("hook", kind=kind, on=self._parameter_in(on, self.random), multipliers=multipliers)
        if self.options.join is None and self.chance(0.4):
            self._collective()
        self._register_anew()

    def _register_anew(self) -> None:
        # A new engine meets a static graph that it has not seen being learnt, but not one that is half learnt.
        learns = self.options.static_graph and self.reduced == 0
        if self.options.join is None and not learns and self.closings.random() < 0.05:
            self._add("register")

    def _parameter_in(self, pattern: str, draw: random.Random) -> str:
        if pattern == "head":
            return "head.weight"
        kind = pattern.removeprefix("layers.").rstrip("0123456789")
        inside = {
            "linear": ["inside.weight", "inside.bias", "outside.weight"],
            "checkpointed": ["block.inside.weight", "block.outside.weight"],
            "square": ["matrix.weight", "matrix.bias"],
            "embedding": ["table.weight"],
            "bag": ["table.weight"],
            "experts": ["up", "down"],
            "convolution": ["convolution.weight", "convolution.bias"],
            "loose": ["value"],
        }[kind]
        return f"{pattern}.{draw.choice(inside)}"

    def _freeze_or_unfreeze(self, keep: bool = False) -> None:
        if not self.freezes:
            return
        alike = self.options.static_graph or self.chance(0.6)
        per_rank = [self._patterns() for _ in range(self.ranks)]
        what = [per_rank[0]] * self.ranks if alike else per_rank
        how = self.random.choice(["flag", "package"])
        if self.chance(0.55):
            # Where gradients are views of buckets, plain DDP averages those that nobody used, too. It shows where ranks
            # dropped different ones; the hook leaves them alone.
            keep = keep or self.options.gradient_as_bucket_view
            self._add("freeze", what=what, how=how, keep=self.chance(0.3) or keep)
        else:
            self._add("unfreeze", what=what, how=how)

    def _patterns(self) -> list[str]:
        if self.chance(0.15):
            return list(self.freezable)
        return self.random.sample(self.freezable, self.random.randint(1, min(3, len(self.freezable))))

    def _collective(self) -> None:
        do = self.random.choice(["policy", "rebuild", "broadcast", "average", "verify", "checkpoint", "evaluate"])
        if do == "policy":
            self._add(do, policy=self._policy())
        elif do == "rebuild":
            search = self.random.choice([None, True, False if self.needs_skip_unused else None])
            self._add(do, search=None if self.options.static_graph else search)
            # A new Reducer learns a static graph anew, and cannot under no_sync.
            self.reduced = 0
        elif do == "broadcast":
            self._add(do, src=self.random.randrange(self.ranks))
        elif do == "average":
            weights = [self.random.randint(0, 3) + (rank == 0) for rank in range(self.ranks)]
            buffers = self.random.choice(["average", "broadcast", "ignore"])
            self._add(do, weights=self.random.choice([None, weights]), buffers=buffers)
        elif do == "verify":
            self._add(do, optimizer=self.chance(0.5))
        elif do == "checkpoint":
            self._add(do, how=self.random.choice(["pickle", "dict"]))
        else:
            self.batches += 2
            self._add(do, batch=self.batches)
