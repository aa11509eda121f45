"""Policies: the presets, how names resolve, and that what cannot be meant is refused by name."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from typing import Any

import pytest

from ddp_hooks import Policy, Tuning, policies
from ddp_hooks.policies import PRESETS, parse_settings, resolve

FIELDS_OF_TUNING = [field.name for field in dataclasses.fields(Tuning)]
FIELDS = [field.name for field in dataclasses.fields(Policy) if field.name != "tuning"]


def with_setting(field: str, value: Any) -> Policy:
    """Make a policy with one setting, of itself or of its tuning."""
    return Policy("mine", tuning=Tuning(**{field: value})) if field in FIELDS_OF_TUNING else replaced(field, value)


def replaced(field: str, value: Any) -> Policy:
    return Policy(**{"name": "mine", field: value})


def owner_of(field: str) -> str:
    return "Tuning" if field in FIELDS_OF_TUNING else "Policy"


def setting_of(policy: Policy, field: str) -> Any:
    return getattr(policy.tuning if field in FIELDS_OF_TUNING else policy, field)


def test_a_policy_has_few_fields() -> None:
    assert len(dataclasses.fields(Policy)) <= 8
    assert not set(FIELDS) & set(FIELDS_OF_TUNING)


def test_presets() -> None:
    assert list(PRESETS) == ["allreduce", "skip_unused", "skip_zeros", "auto"]
    assert {
        name: (policy.skip_unused, policy.skip_zeros, policy.skip_zero_rows, policy.coded)
        for name, policy in PRESETS.items()
    } == {
        "allreduce": (False, "off", "off", "off"),
        "skip_unused": (True, "off", "off", "off"),
        "skip_zeros": (True, "on", "on", "off"),
        "auto": (True, "adaptive", "adaptive", "auto"),
    }
    for name, policy in PRESETS.items():
        assert policy.name == name
        plain = Policy(name)
        what = ("skip_unused", "skip_zeros", "skip_zero_rows", "coded")
        assert dataclasses.replace(policy, **{field: getattr(plain, field) for field in what}) == plain


@pytest.mark.parametrize("name", PRESETS)
def test_resolve_knows_every_preset(name: str) -> None:
    assert resolve(name) is PRESETS[name]


def test_resolve_takes_a_policy_as_it_is() -> None:
    policy = Policy("mine", skip_zeros="on")
    assert resolve(policy) is policy


def test_resolve_sets_fields_differently() -> None:
    assert resolve("auto", {"rebuild_after": 10}) == dataclasses.replace(PRESETS["auto"], rebuild_after=10)
    policy = Policy("mine", skip_zeros="on", tuning=Tuning(segment_bytes=3))
    assert resolve(policy, {"skip_zero_rows": "adaptive"}) == dataclasses.replace(policy, skip_zero_rows="adaptive")
    assert resolve(policy, {}) is policy


def test_resolve_puts_what_belongs_to_the_tuning_there() -> None:
    policy = Policy("mine", tuning=Tuning(segment_bytes=3))
    resolved = resolve(policy, {"pack_bytes": 1 << 20, "rebuild_after": 10})
    assert resolved == Policy("mine", rebuild_after=10, tuning=Tuning(segment_bytes=3, pack_bytes=1 << 20))
    assert resolve(policy, {"tuning": Tuning(owners=False)}) == Policy("mine", tuning=Tuning(owners=False))
    both = resolve(policy, {"pack_bytes": 1, "tuning": Tuning(owners=False)})
    assert both == Policy("mine", tuning=Tuning(owners=False, pack_bytes=1))


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"rebuild_after": -1}, ValueError, r"Policy\.rebuild_after: expected at least 0, received -1"),
        ({"skip_zeros": "sometimes"}, ValueError, r"Policy\.skip_zeros: expected one of .* received 'sometimes'"),
        ({"skip_unused": 1}, TypeError, r"Policy\.skip_unused: expected a bool, received 1"),
        ({"pack_bytes": -1}, ValueError, r"Tuning\.pack_bytes: expected at least 0, received -1"),
        ({"tuning": {}}, TypeError, r"Policy\.tuning: expected a ddp_hooks\.Tuning, received {}"),
        ({"tuning": {}, "pack_bytes": 1}, TypeError, r"Policy\.tuning: expected a ddp_hooks\.Tuning, received {}"),
        ({"graph": True}, TypeError, "received 'graph'; Policy has name, .*; Tuning has in_place_bytes"),
        (
            {"rebuild_afer": 10, "speed": 1},
            TypeError,
            r"expected fields of ddp_hooks\.Policy or ddp_hooks\.Tuning, received 'rebuild_afer'; did you mean "
            r"'rebuild_after'\?, 'speed'; Policy has name, .*; Tuning has in_place_bytes, ",
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
        (["skip_unused=false", "owners=True"], {"skip_unused": False, "owners": True}),
        (["report_hang_after=1", "min_zero_fraction=1e-3"], {"report_hang_after": 1.0, "min_zero_fraction": 1e-3}),
        (["skip_zeros=on", "coded=off", "name=a=b"], {"skip_zeros": "on", "coded": "off", "name": "a=b"}),
        (["pack_bytes=1", "pack_bytes=2"], {"pack_bytes": 2}),
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
        ("min_zero_fraction=much", "min_zero_fraction: expected a number, received 'much'"),
        ("skip_unused=1", "skip_unused: expected true or false, received '1'"),
        ("tuning=Tuning()", "tuning: expected one of its fields, as in pack_bytes=1000000"),
        ("speed=1", r"expected fields of ddp_hooks\.Policy or ddp_hooks\.Tuning, received 'speed'; Policy has name, "),
    ],
)
def test_texts_that_are_no_settings(text: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        parse_settings([text])


def test_every_field_can_be_read_from_text() -> None:
    for field in (*FIELDS, *FIELDS_OF_TUNING):
        value = setting_of(PRESETS["auto"], field)
        assert parse_settings([f"{field}={value}"]) == {field: value}


def test_resolve_refuses_an_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"^expected one of .*, received 'fast'$") as caught:
        resolve("fast")
    assert all(name in str(caught.value) for name in PRESETS)


@pytest.mark.parametrize("policy", [None, 3, Policy, {"name": "auto"}])
def test_resolve_refuses_what_is_no_policy(policy: Any) -> None:
    with pytest.raises(TypeError, match=r"^expected a ddp_hooks\.Policy or the name of a preset, received") as e:
        resolve(policy)
    assert repr(policy) in str(e.value)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("skip_zeros", "sometimes", "one of ('off', 'on', 'adaptive')"),
        ("skip_zeros", True, "one of ('off', 'on', 'adaptive')"),
        ("skip_zero_rows", "rows", "one of ('off', 'on', 'adaptive')"),
        ("skip_zeros", None, "one of ('off', 'on', 'adaptive')"),
        ("in_place_bytes", -1, "at least 0"),
        ("pack_bytes", -1, "at least 0"),
        ("min_zero_fraction", -0.01, "a number from 0 to 1"),
        ("min_zero_fraction", 1.01, "a number from 0 to 1"),
        ("min_zero_fraction", float("inf"), "a number from 0 to 1"),
        ("segment_bytes", 0, "at least 1"),
    ],
)
def test_validation_names_the_field_and_what_was_expected_and_received(field: str, value: Any, expected: str) -> None:
    message = re.escape(f"{owner_of(field)}.{field}: expected {expected}, received {value!r}")
    with pytest.raises(ValueError, match=f"^{message}$"):
        with_setting(field, value)
    with pytest.raises(ValueError, match=f"^{message}$"):
        resolve(Policy("mine"), {field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("skip_zeros", "adaptive"),
        ("in_place_bytes", 0),
        ("pack_bytes", 0),
        ("min_zero_fraction", 0),
        ("min_zero_fraction", 1.0),
        ("segment_bytes", 1),
    ],
)
def test_the_ends_of_each_range_are_allowed(field: str, value: Any) -> None:
    assert setting_of(with_setting(field, value), field) == value


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Tuning.min_zero_fraction: expected a number from 0 to 1, received nan"):
        with_setting("min_zero_fraction", float("nan"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("in_place_bytes", 1.5),  # refused only by the engine, without the field's name
        ("pack_bytes", "32"),  # an error of the comparison: '<' not supported between str and int
        ("skip_unused", "off"),  # taken for true
    ],
)
def test_wrong_types_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{owner_of(field)}.{field}: expected .*, received {value!r}"):
        with_setting(field, value)


def test_is_frozen() -> None:
    for settings in (Policy("mine"), Tuning()):
        for field in dataclasses.fields(settings):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(settings, field.name, getattr(settings, field.name))
        assert not hasattr(settings, "__dict__")


def test_round_trips() -> None:
    tuning = Tuning(in_place_bytes=1, pack_bytes=2, min_zero_fraction=0.25)
    policy = Policy("mine", skip_unused=False, skip_zeros="adaptive", tuning=tuning)
    assert list(policy.to_dict()) == [field.name for field in dataclasses.fields(Policy)]
    assert list(policy.to_dict()["tuning"]) == FIELDS_OF_TUNING
    assert Policy.from_dict(policy.to_dict()) == policy
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    # Ranks compare policies by their representation.
    assert eval(repr(policy), {"Policy": Policy, "Tuning": Tuning}) == policy


def test_rows_are_agreed_on_where_usage_is() -> None:
    """What ranks object to travels with the masks of skip_unused."""
    for field in ("skip_zero_rows", "coded"):
        message = rf"Policy.{field}: expected 'off' with skip_unused=False, received 'on'; set skip_unused=True"
        with pytest.raises(ValueError, match=message):
            Policy(**{"name": "mine", "skip_unused": False, field: "on"})


def test_a_policy_shows_what_differs_from_the_defaults() -> None:
    assert repr(PRESETS["skip_unused"]) == "Policy(name='skip_unused')"
    assert repr(Policy("mine", coded="on")) == "Policy(name='mine', coded='on')"
    assert repr(Tuning()) == "Tuning()"
    tuned = Policy("mine", tuning=Tuning(owners=False, pack_bytes=1))
    assert repr(tuned) == "Policy(name='mine', tuning=Tuning(pack_bytes=1, owners=False))"


@pytest.mark.parametrize("field", [*FIELDS, *FIELDS_OF_TUNING])
def test_policies_that_differ_are_shown_differently(field: str) -> None:
    other = {
        "name": "yours",
        "skip_unused": False,
        "skip_zeros": "on",
        "skip_zero_rows": "on",
        "coded": "on",
        "direct": False,
        "owners": False,
        "min_zero_fraction": 0.5,
        "report_hang_after": 60.0,
    }
    changed = resolve(Policy("mine"), {field: other.get(field, 1 << 21)})
    assert changed != Policy("mine")
    assert repr(changed) != repr(Policy("mine"))
    assert f"{field}={setting_of(changed, field)!r}" in repr(changed)


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (0, -0.0), (0.0, -0.0)])
def test_policies_that_are_equal_are_shown_alike(one: float, other: float) -> None:
    assert repr(with_setting("min_zero_fraction", one)) == repr(with_setting("min_zero_fraction", other))


def test_an_older_checkpoint_is_read_with_the_default_of_a_new_field(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy("mine", skip_zeros="on", tuning=Tuning(segment_bytes=3))
    older = policy.to_dict()
    del older["rebuild_after"], older["tuning"]["max_unit_bytes"]
    with pytest.raises(ValueError, match=r"Policy: .* without rebuild_after"):
        Policy.from_dict(older)
    monkeypatch.setattr(policies, "_FIRST_FIELDS", tuple(older))  # as if the field were a newer one
    with pytest.raises(ValueError, match=r"Tuning: .* without max_unit_bytes"):
        Policy.from_dict(older)
    monkeypatch.setattr(policies, "_FIRST_FIELDS_OF_TUNING", tuple(older["tuning"]))
    assert Policy.from_dict(older) == policy


def test_every_checkpoint_has_held_what_is_there_today() -> None:
    assert set(policies._FIRST_FIELDS) == {*FIELDS, "tuning"} - {"coded"}
    assert set(policies._FIRST_FIELDS_OF_TUNING) == set(FIELDS_OF_TUNING) - {"report_hang_after"}


def test_every_field_is_described() -> None:
    for kind in (Policy, Tuning):
        for field in dataclasses.fields(kind):
            assert f"        {field.name}: " in (kind.__doc__ or ""), field.name
