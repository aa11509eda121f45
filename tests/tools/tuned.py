"""Policies with other values for the engine's constants, which users cannot change."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import ddp_hooks


@dataclass(frozen=True, slots=True, repr=False)
class Tuning(ddp_hooks.Tuning):
    """A tuning that also has the constants, at the values that csrc/ gives them; see engine_settings.py."""

    gap_fraction: float = 1 / 128
    min_direct_bytes: int = 256 << 10
    min_owner_saving: float = 0.13
    min_divided_bytes: int = 64 << 10
    hold_steps: int = 32
    first_pause_steps: int = 16
    longest_pause_steps: int = 1024
    opening_bytes: int | None = None


def with_settings(policy: ddp_hooks.Policy | str, **settings: Any) -> ddp_hooks.Policy:
    """Return the policy with fields of it, of its tuning or of the constants set differently."""
    of_constants = {field.name for field in fields(Tuning)} - {field.name for field in fields(ddp_hooks.Tuning)}
    constants = {name: settings.pop(name) for name in of_constants & settings.keys()}
    found = ddp_hooks.policies.resolve(policy, settings)
    tuning = Tuning(**{field.name: getattr(found.tuning, field.name) for field in fields(found.tuning)})
    return replace(found, tuning=replace(tuning, **constants))
