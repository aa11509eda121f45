"""Policies: the presets, how names resolve, and that what cannot be meant is refused by name."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any

import pytest

from ddp_hooks import PRESETS, Policy, policies
from ddp_hooks.policies import parse_settings, resolve


def test_presets() -> None:
    assert list(PRESETS) == ["allreduce", "skip_unused", "skip_zeros", "auto"]
    assert {name: (policy.graph, policy.values, policy.units) for name, policy in PRESETS.items()} == {
        "allreduce": (False, "off", "off"),
        "skip_unused": (True, "off", "off"),
        "skip_zeros": (True, "on", "on"),
        "auto": (True, "adaptive", "adaptive"),
    }
    for name, policy in PRESETS.items():
        assert policy.name == name
        # They differ in what is sent, not in how.
        plain = Policy(name)
        assert dataclasses.replace(policy, graph=plain.graph, values=plain.values, units=plain.units) == plain


def test_defaults_send_less_than_one_percent_too_much() -> None:
    assert Policy("mine").gap_fraction < 0.01


@pytest.mark.parametrize("name", PRESETS)
def test_resolve_knows_every_preset(name: str) -> None:
    assert resolve(name) is PRESETS[name]


def test_resolve_takes_a_policy_as_it_is() -> None:
    policy = Policy("mine", values="on")
    assert resolve(policy) is policy


def test_resolve_sets_fields_differently() -> None:
    assert resolve("auto", {"rebuild_after": 10}) == dataclasses.replace(PRESETS["auto"], rebuild_after=10)
    policy = Policy("mine", values="on")
    assert resolve(policy, {"units": "adaptive"}) == Policy("mine", values="on", units="adaptive")
    assert resolve(policy, {}) is policy


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"rebuild_after": -1}, ValueError, r"Policy\.rebuild_after: expected at least 0, received -1"),
        ({"values": "sometimes"}, ValueError, r"Policy\.values: expected one of .* received 'sometimes'"),
        ({"graph": 1}, TypeError, r"Policy\.graph: expected a bool, received 1"),
        (
            {"rebuild_afer": 10, "speed": 1},
            TypeError,
            r"policy: expected fields of ddp_hooks\.Policy as settings \(name, .*\), received rebuild_afer, speed",
        ),
    ],
)
def test_resolve_checks_what_is_set(settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        resolve("auto", settings)


@pytest.mark.parametrize(
    ("texts", "settings"),
    [
        (["rebuild_after=10"], {"rebuild_after": 10}),
        (["rebuild_after=-1"], {"rebuild_after": -1}),  # which the policy itself refuses
        (["graph=false", "owners=True"], {"graph": False, "owners": True}),
        (["gap_fraction=1", "min_zero_fraction=1e-3"], {"gap_fraction": 1.0, "min_zero_fraction": 1e-3}),
        (["values=on", "units=off", "name=a=b"], {"values": "on", "units": "off", "name": "a=b"}),
        (["hold_steps=1", "hold_steps=2"], {"hold_steps": 2}),
        ([], {}),
    ],
)
def test_settings_are_read_from_text(texts: list[str], settings: dict[str, Any]) -> None:
    read = parse_settings(texts)
    assert read == settings
    assert [type(value) for value in read.values()] == [type(value) for value in settings.values()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rebuild_after", "expected NAME=VALUE, received 'rebuild_after'"),
        ("rebuild_after=", "rebuild_after: expected an int, received ''"),
        ("rebuild_after=1.5", "rebuild_after: expected an int, received '1.5'"),
        ("gap_fraction=much", "gap_fraction: expected a number, received 'much'"),
        ("graph=1", "graph: expected true or false, received '1'"),
        ("speed=1", r"expected fields of ddp_hooks\.Policy as settings \(name, .*\), received speed"),
    ],
)
def test_texts_that_are_no_settings(text: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        parse_settings([text])


def test_every_field_can_be_read_from_text() -> None:
    for field in dataclasses.fields(Policy):
        value = getattr(PRESETS["auto"], field.name)
        assert parse_settings([f"{field.name}={value}"]) == {field.name: value}


def test_resolve_refuses_an_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"policy: expected one of .*, received 'fast'") as caught:
        resolve("fast")
    assert all(name in str(caught.value) for name in PRESETS)


@pytest.mark.parametrize("policy", [None, 3, Policy, {"name": "auto"}])
def test_resolve_refuses_what_is_no_policy(policy: Any) -> None:
    with pytest.raises(TypeError, match=r"policy: expected a ddp_hooks\.Policy or the name of a preset, received") as e:
        resolve(policy)
    assert repr(policy) in str(e.value)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("values", "sometimes", "one of ('off', 'on', 'adaptive')"),
        ("values", True, "one of ('off', 'on', 'adaptive')"),
        ("units", "rows", "one of ('off', 'on', 'adaptive')"),
        ("values", None, "one of ('off', 'on', 'adaptive')"),
        ("in_place_bytes", -1, "at least 0"),
        ("pack_bytes", -1, "at least 0"),
        ("gap_fraction", -0.01, "between 0 and 1"),
        ("gap_fraction", 1.01, "between 0 and 1"),
        ("gap_fraction", float("inf"), "between 0 and 1"),
        ("min_zero_fraction", -0.01, "between 0 and 1"),
        ("min_zero_fraction", 1.01, "between 0 and 1"),
        ("hold_steps", -1, "at least 0"),
        ("first_pause_steps", 0, "at least 1"),
        ("longest_pause_steps", 15, "at least 16"),
    ],
)
def test_validation_names_the_field_and_what_was_expected_and_received(field: str, value: Any, expected: str) -> None:
    message = re.escape(f"Policy.{field}: expected {expected}, received {value!r}")
    with pytest.raises(ValueError, match=f"^{message}$"):
        Policy("mine", **{field: value})
    with pytest.raises(ValueError, match=f"^{message}$"):
        dataclasses.replace(Policy("mine"), **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("values", "adaptive"),
        ("in_place_bytes", 0),
        ("pack_bytes", 0),
        ("gap_fraction", 0),
        ("gap_fraction", 1),
        ("min_zero_fraction", 0),
        ("min_zero_fraction", 1.0),
        ("hold_steps", 0),
        ("first_pause_steps", 1),
        ("longest_pause_steps", 16),
    ],
)
def test_the_ends_of_each_range_are_allowed(field: str, value: Any) -> None:
    assert getattr(Policy("mine", **{field: value}), field) == value


@pytest.mark.parametrize("field", ["gap_fraction", "min_zero_fraction"])
def test_nan_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"Policy.{field}: expected between 0 and 1, received nan"):
        Policy("mine", **{field: float("nan")})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("in_place_bytes", 1.5),  # refused only by the engine, without the field's name
        ("hold_steps", "32"),  # an error of the comparison: '<' not supported between str and int
        ("graph", "off"),  # taken for true
    ],
)
def test_wrong_types_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"Policy.{field}: expected .*, received {value!r}"):
        Policy("mine", **{field: value})


def test_is_frozen() -> None:
    policy = Policy("mine")
    for field in dataclasses.fields(Policy):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policy, field.name, getattr(policy, field.name))
    assert not hasattr(policy, "__dict__")


def test_round_trips() -> None:
    policy = Policy("mine", graph=False, values="adaptive", in_place_bytes=1, pack_bytes=2, gap_fraction=0.25)
    assert list(policy.to_dict()) == [field.name for field in dataclasses.fields(Policy)]
    assert Policy(**policy.to_dict()) == Policy.from_dict(policy.to_dict()) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    # Ranks compare policies by their representation.
    assert eval(repr(policy), {"Policy": Policy}) == policy


def test_units_are_agreed_on_where_usage_is() -> None:
    """What ranks object to travels beside the masks of the graph detector."""
    with pytest.raises(ValueError, match=r"Policy.units: expected 'off' without the graph detector, received 'on'"):
        Policy("mine", graph=False, units="on")


def test_a_policy_shows_what_differs_from_the_defaults() -> None:
    assert repr(PRESETS["skip_unused"]) == "Policy(name='skip_unused')"
    assert repr(PRESETS["auto"]) == "Policy(name='auto', values='adaptive', units='adaptive')"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Policy)])
def test_policies_that_differ_are_shown_differently(field: str) -> None:
    other = {
        "name": "yours",
        "graph": False,
        "values": "on",
        "units": "on",
        "direct": False,
        "owners": True,
        "average": "contributors",
        "gap_fraction": 0.5,
        "min_zero_fraction": 0.5,
        "first_pause_steps": 2,
    }
    changed = dataclasses.replace(Policy("mine"), **{field: other.get(field, 1 << 21)})
    assert changed != Policy("mine")
    assert repr(changed) != repr(Policy("mine"))
    assert f"{field}={getattr(changed, field)!r}" in repr(changed)


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (0, -0.0), (0.0, -0.0)])
def test_policies_that_are_equal_are_shown_alike(one: float, other: float) -> None:
    assert repr(Policy("mine", gap_fraction=one)) == repr(Policy("mine", gap_fraction=other))


def test_an_older_checkpoint_is_read_with_the_default_of_a_new_field(monkeypatch: pytest.MonkeyPatch) -> None:
    older = Policy("mine", values="on").to_dict()
    del older["rebuild_after"]
    with pytest.raises(ValueError, match="without rebuild_after"):
        Policy.from_dict(older)
    monkeypatch.setattr(policies, "_FIRST_FIELDS", tuple(older))  # as if the field were a newer one
    assert Policy.from_dict(older) == Policy("mine", values="on")


def test_every_field_is_described() -> None:
    for field in dataclasses.fields(Policy):
        assert f"        {field.name}: " in (Policy.__doc__ or ""), field.name
