"""A `Sync` keeps what its first call found, and sees whatever has changed in between."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import anyrank
from anyrank.live.ends import find_end
from anyrank.world.ranks import one_process


class Net(nn.Module):
    """Two layers of one shape, a tied one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.c.weight = self.a.weight
        self.register_buffer("scale", torch.ones(3))


def set_data(net: Net, data: torch.Tensor) -> None:
    net.b.weight.data = data


def with_lora(net: Net) -> Any:
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(target_modules=["b"], init_lora_weights=False), net)


def merged(net: Net) -> None:
    with_lora(net).b.merge()


CHANGES: dict[str, Callable[[Net], Any]] = {
    "a parameter replaced": lambda net: setattr(net.b, "weight", nn.Parameter(torch.ones(3, 3))),
    "other data": lambda net: set_data(net, torch.ones(3, 3)),
    "another shape": lambda net: set_data(net, torch.ones(4, 3)),
    "another dtype": lambda net: net.to(torch.bfloat16),
    "on meta": lambda net: setattr(net, "b", nn.Linear(3, 3, device="meta")),
    "data on meta": lambda net: net.to_empty(device="meta"),
    "tied": lambda net: setattr(net.b, "weight", net.a.weight),
    "a parameter left out": lambda net: setattr(net.b, "bias", None),
    "untied": lambda net: setattr(net.c, "weight", nn.Parameter(torch.ones(3, 3))),
    "a module replaced": lambda net: setattr(net, "b", nn.Linear(3, 3)),
    "a module of another class": lambda net: setattr(net, "b", nn.Bilinear(3, 3, 3)),
    "a module added": lambda net: setattr(net, "d", nn.Linear(3, 3)),
    "a module that refers to its parent": lambda net: setattr(net.a, "up", net),
    "a module taken out": lambda net: delattr(net, "b"),
    "a module used twice": lambda net: setattr(net, "b", net.a),
    "modules swapped": lambda net: net.__dict__["_modules"].update(a=net.b, b=net.a),
    "a buffer replaced": lambda net: setattr(net, "scale", torch.zeros(3)),
    "a buffer removed": lambda net: setattr(net, "scale", None),
    "a buffer out of the state": lambda net: net._non_persistent_buffers_set.add("scale"),
    "a parameter as a buffer": lambda net: (
        delattr(net.b, "bias"),
        net.b.register_buffer("bias", torch.ones(3)),
    ),
    "frozen": lambda net: anyrank.freeze(net.b),
    "tensors swapped": lambda net: torch.utils.swap_tensors(net.b.weight, net.b.bias),
    "an adapter": with_lora,
    "an adapter merged": merged,
    "nothing": lambda net: None,
}
# To other ranks the model is the same then, and a kept plan still serves.
ALIKE = (
    "nothing",
    "other data",
    "a parameter replaced",
    "a module replaced",
    "a module that refers to its parent",
    "a buffer replaced",
    "frozen",
)


@pytest.mark.parametrize("change", CHANGES)
def test_what_other_ranks_must_know_of_is_seen(change: str) -> None:
    net = Net()
    before = find_end(net, one_process())
    CHANGES[change](net)
    after = find_end(net, one_process())
    assert (after.described == before.described) == (change in ALIKE)
    assert (after.digest == before.digest) == (change in ALIKE)


def test_an_adapter_that_is_merged_and_taken_off_again_is_seen() -> None:
    net = with_lora(Net())
    digests = [find_end(net, one_process()).digest]
    for change in (net.b.merge, net.b.unmerge):
        change()
        digests.append(find_end(net, one_process()).digest)
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize("change", ["other data", "untied", "modules swapped", "another dtype"])
def test_the_values_arrive_where_the_change_put_them(change: str) -> None:
    src, dst = Net(), Net()
    weights = anyrank.Sync(dst, src)
    assert [weights().is_planned for _ in range(2)] == [True, False]
    for net in (src, dst):
        CHANGES[change](net)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.normal_()
    weights()
    for key, value in src.state_dict().items():
        assert torch.equal(dst.state_dict()[key], value)


def test_memory_that_came_to_be_shared_is_seen() -> None:
    src, dst = Net(), Net()
    weights = anyrank.Sync(dst, src)
    weights()
    base = torch.zeros(12)
    dst.a.bias.data, dst.b.bias.data = base[:3], base[2:5]
    with pytest.raises(anyrank.LoadError, match=r"a\.bias and b\.bias overlap in memory"):
        weights()


def lay(parameter: Any, how: str) -> None:
    """Give a parameter memory that lies in another way, under the plan that is kept."""
    shape = parameter.shape
    if how == "turned":
        parameter.data = torch.empty(shape[::-1]).t()
    elif how == "every other":
        parameter.data = torch.empty(shape[0], 2 * shape[1])[:, ::2]
    elif how == "behind others":
        parameter.data = torch.empty(5 + shape.numel())[5:].view(shape)
    elif how == "set_":
        with torch.no_grad():
            parameter.set_(torch.empty(shape[::-1]).t())
    elif how == "storage":
        with torch.no_grad():
            parameter.set_(parameter.untyped_storage().clone(), 0, shape, parameter.stride())
    elif how == "requires_grad":
        parameter.requires_grad_(False)


LAYS = ["turned", "every other", "behind others", "set_", "storage", "requires_grad"]


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("end", ["src", "dst"])
@pytest.mark.parametrize("how", LAYS)
def test_memory_that_lies_otherwise_is_seen(how: str, end: str, atomic: bool) -> None:
    src, dst = nn.Linear(6, 4), nn.Linear(6, 4)
    weights = anyrank.Sync(dst, src, atomic=atomic)
    weights()
    for one in ("turned", how, "behind others", how):
        lay((src if end == "src" else dst).weight, one)
        with torch.no_grad():
            src.weight.normal_()
        before = src.weight.detach().clone()
        assert not weights().is_planned
        assert torch.equal(src.weight, before)
        assert torch.equal(dst.weight, before)


def test_a_kept_call_holds_no_tensor_of_the_call_before() -> None:
    src, dst = {"w": torch.ones(4, 4)}, {"w": torch.zeros(4, 4)}
    weights = anyrank.Sync(dst, src)
    weights()
    held = [weakref.ref(end.pop("w")) for end in (src, dst)]
    gc.collect()
    assert [ref() for ref in held] == [None, None]
