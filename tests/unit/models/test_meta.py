"""`anyrank.meta`: a model as the normal build makes it, without its parameters' memory."""

from __future__ import annotations

import operator
import threading
from typing import Any

import pytest
import torch
from torch import nn

import anyrank
from anyrank.testing import PeakMemory

MIB = 1 << 20


class Marked(nn.Parameter):
    """A parameter type of somebody's own."""


class Everything(nn.Module):
    """Parameters of every kind, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.randn(3, 2).t())
        shared.tag = "kept"
        self.a = shared
        self.b = shared
        self.register_parameter("fixed", nn.Parameter(torch.randn(2), requires_grad=False))
        self.register_parameter("absent", None)
        self.counts = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
        self.marked = Marked(torch.ones(2, dtype=torch.bfloat16))
        self.marked.note = 3
        self.several = nn.ParameterList([torch.ones(2), torch.ones(3)])
        self.inner = nn.Linear(2, 2)
        self.outer = nn.Linear(2, 2)
        self.outer.weight = self.inner.weight
        self.register_buffer("scale", torch.arange(3.0))
        self.register_buffer("derived", torch.ones(2), persistent=False)


def describe(model: nn.Module) -> dict[str, Any]:
    return {
        name: (tuple(p.shape), p.stride(), p.dtype, p.requires_grad, type(p), dict(p.__dict__))
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def ties(model: nn.Module) -> set[tuple[str, ...]]:
    """Names of the parameters that are one object."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {tuple(each) for each in names.values() if len(each) > 1}


def test_parameters_differ_from_the_normal_build_in_their_device_only() -> None:
    with anyrank.meta():
        model = Everything()
    normal = Everything()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert describe(model) == describe(normal)
    assert ties(model) == ties(normal) == {("a", "b"), ("inner.weight", "outer.weight")}
    assert isinstance(model.marked, Marked)


def test_buffers_are_real_and_have_their_values() -> None:
    with anyrank.meta():
        model = Everything()
    for name, buffer in Everything().named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


def test_a_parameter_that_is_meta_already_passes_as_it_is() -> None:
    parameter = nn.Parameter(torch.empty(2, device="meta"))
    with anyrank.meta():
        module = nn.Module()
        module.weight = parameter
    assert module.weight is parameter


def test_parameters_that_were_registered_before_stay_real_until_registered_anew() -> None:
    outside = nn.Linear(2, 2)
    with anyrank.meta():
        inside = nn.Linear(2, 2)
        inside.weight = outside.weight
    assert not outside.weight.is_meta
    assert inside.weight.is_meta


def test_a_lazy_parameter_waits_for_its_shape() -> None:
    with anyrank.meta():
        module = nn.Sequential(nn.LazyLinear(3))
    assert module(torch.ones(2, 4)).shape == (2, 3)


def test_a_buffer_computed_from_a_parameter_is_on_meta() -> None:
    class Derived(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("norm", self.weight.detach().norm())

    with anyrank.meta():
        module = Derived()
    assert module.norm.is_meta


def test_nests_and_ends_also_after_an_exception() -> None:
    with pytest.raises(KeyError), anyrank.meta():  # noqa: PT012
        with anyrank.meta():
            assert nn.Linear(2, 2).weight.is_meta
        assert nn.Linear(2, 2).weight.is_meta
        raise KeyError
    assert not nn.Linear(2, 2).weight.is_meta


def test_other_threads_build_as_usual() -> None:
    devices: list[str] = []

    def build() -> None:
        devices.append(nn.Linear(2, 2).weight.device.type)

    with anyrank.meta():
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
    assert devices == ["cpu"]


class Filled(nn.Module):
    """A parameter whose every page is written before it is registered, as torch.randn does."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(nbytes // 4))


@pytest.mark.parametrize("layer", [Filled, lambda nbytes: nn.Linear(1024, nbytes // 4096)])
def test_building_takes_the_memory_of_one_parameter(layer: Any) -> None:
    layers, layer_bytes = 5, 40 * MIB  # above 32 MiB malloc gives freed memory back at once

    def peak_bytes() -> int:
        with PeakMemory() as peak:
            model = nn.Sequential(*(layer(layer_bytes) for _ in range(layers)))
        assert len(model) == layers
        return peak.peak_bytes

    with anyrank.meta():
        assert peak_bytes() < 1.5 * layer_bytes
    # Else the line above could not fail; a kernel that reclaims pages may hide some of the layers.
    assert peak_bytes() > 1.5 * layer_bytes


# -- transformers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("builder", "kind", "options"),
    [
        ("LlamaForCausalLM", "llama", {"tie_word_embeddings": True}),
        ("LlamaForCausalLM", "llama", {"tie_word_embeddings": False}),
        ("AutoModelForCausalLM.from_config", "qwen2", {}),
        ("AutoModel.from_config", "bert", {}),
        ("BertForMaskedLM", "bert", {}),
    ],
)
def test_a_transformers_model_is_the_normal_one_without_memory(
    builder: str, kind: str, options: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
    config = transformers.AutoConfig.for_model(kind, num_attention_heads=2, **sizes, **options)
    build = operator.attrgetter(builder)(transformers)
    with anyrank.meta():
        model = build(config)
    normal = build(config)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert describe(model) == describe(normal)
    assert ties(model) == ties(normal)
    buffers = dict(normal.named_buffers())
    assert buffers
    assert dict(model.named_buffers()).keys() == buffers.keys()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
