"""What the doctor calls each of several modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from ddp_hooks.doctor.naming import choose_names, class_name, find_names, find_names_in_frames


def test_variables_attributes_and_elements_are_found() -> None:
    generator, critic = nn.Linear(1, 1), nn.Linear(1, 1)
    models = {"G": generator}

    class Trainer:
        def __init__(self, net: nn.Module) -> None:
            self.net_d = net
            self.found: list[str] = []

        def step(self) -> None:
            self.found = find_names_in_frames(self.net_d)

    def call(net: nn.Module) -> list[str]:
        return find_names_in_frames(net)

    trainer = Trainer(critic)
    # The outermost frame gave the name.
    assert call(generator)[:2] == ["generator", "models['G']"]
    assert call(generator)[-1] == "net"
    trainer.step()
    assert trainer.found[:2] == ["critic", "trainer.net_d"]
    assert trainer.found[-1] == "net_d"
    assert "net_d" in find_names(critic)
    assert models


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)


class _Odd:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("on purpose")


def test_odd_objects_are_no_trouble() -> None:
    odd, outer = _Odd(), _Outer()
    many = [outer.inner] * 1000
    found = find_names_in_frames(outer.inner)
    assert found == ["outer.inner"]
    assert len(many) == 1000
    assert type(odd) is _Odd


def test_a_name_belongs_to_one_module() -> None:
    assert choose_names([["net", "nets[0]"], ["net", "nets[1]"]]) == ["nets[0]", "nets[1]"]
    assert choose_names([["model"], ["model"]]) == [None, None]
    assert choose_names([["netG"], []]) == ["netG", None]
    assert choose_names([]) == []


def test_classes() -> None:
    class Net(nn.Module):
        pass

    assert class_name(Net()) == "Net"
    assert class_name(nn.Sequential()) == "Sequential"
