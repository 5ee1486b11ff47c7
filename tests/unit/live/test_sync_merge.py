"""`sync(..., merge=True)` gives what PEFT's `merge_and_unload()` makes, bit by bit, or refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

import anyrank
from anyrank.live.merge import product, tiles
from anyrank.tensors.box import Box


class Net(nn.Module):
    """An embedding, layers that are stored either way, and a head."""

    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.up, self.down = nn.Linear(width, hidden), Conv1D(width, hidden)
        self.head = nn.Linear(width, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.embed(x))))


def lora(net: nn.Module, *, autocast: bool = True, **options: Any) -> Any:
    """A model with an adapter that changes what it computes."""
    given: dict[str, Any] = {"r": 4, "target_modules": ["up"], **options}
    config = LoraConfig(**given)
    model: Any = get_peft_model(net, config, autocast_adapter_dtype=autocast)
    change(model)
    return model


def change(model: nn.Module) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_()


def expected_of(src: Any) -> dict[str, torch.Tensor]:
    return copy.deepcopy(src).merge_and_unload().state_dict()


def two_adapters() -> Any:
    model = lora(Net().bfloat16())
    model.add_adapter("other", LoraConfig(r=2, target_modules=["up", "head"]))
    model.add_adapter("idle", LoraConfig(r=2, target_modules=["up"]))
    change(model)
    model.base_model.set_adapter(["default", "other"])
    return model


def already_merged() -> Any:
    model = lora(Net())
    model.merge_adapter()
    return model


def scaled() -> Any:
    model = lora(Net())
    model.base_model.model.up.set_scale("default", 0.3)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "linear": lambda: lora(Net()),
    "stored [in, out]": lambda: lora(Net(), target_modules=["down"], fan_in_fan_out=True),
    "embedding": lambda: lora(Net(), target_modules=["embed", "head"]),
    "rslora": lambda: lora(Net(), use_rslora=True),
    "pissa": lambda: lora(Net(), init_lora_weights="pissa"),
    "olora": lambda: lora(Net(), init_lora_weights="olora"),
    "modules to save": lambda: lora(Net(), modules_to_save=["head"]),
    "bfloat16": lambda: lora(Net().bfloat16(), autocast=False, target_modules=["up", "embed"]),
    "bfloat16 base": lambda: lora(Net().bfloat16(), target_modules=["up", "embed"]),
    "two adapters": two_adapters,
    "already merged": already_merged,
    "scaled": scaled,
    "tiles": lambda: lora(Net(100, 5000), target_modules=["up", "down"], fan_in_fan_out=False),
}


@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out", "ignore:Already following adapters")
@pytest.mark.filterwarnings("ignore:All adapters are already merged")
@pytest.mark.parametrize("kind", MODELS)
def test_the_weights_are_those_of_merge_and_unload(kind: str) -> None:
    torch.manual_seed(0)
    src = MODELS[kind]()
    before = {name: tensor.clone() for name, tensor in src.state_dict().items()}
    expected = expected_of(src)
    dst = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    weights = anyrank.Sync(dst, src, merge=True, verify=True)
    report = weights()
    for name, tensor in expected.items():
        assert torch.equal(dst[name], tensor), name
    assert all(torch.equal(before[name], tensor) for name, tensor in src.state_dict().items())
    assert bool(report.merged) == (kind != "already merged")
    assert not report.renamed
    assert not weights().is_planned


def test_the_report_names_what_was_merged() -> None:
    src = lora(Net())
    dst = Net()
    weights = anyrank.Sync(dst, src, merge=True)
    report = weights()
    assert report.merged == {"up.weight": "default x 2"}
    assert "merged" in str(report)
    src.base_model.model.up.scale_layer(0.5)
    report = weights()  # another scaling is another plan
    assert (report.is_planned, report.merged) == (True, {"up.weight": "default x 1"})
    assert torch.equal(dst.up.weight, expected_of(src)["up.weight"])


def test_values_of_a_later_step_are_sent_by_a_kept_plan() -> None:
    src, dst = lora(Net()), Net()
    weights = anyrank.Sync(dst, src, merge=True)
    weights()
    with torch.no_grad():
        for parameter in src.parameters():
            parameter.mul_(1.5)
    assert not weights().is_planned
    assert torch.equal(dst.up.weight, expected_of(src)["up.weight"])


@pytest.mark.parametrize("atomic", [False, True])
def test_a_dst_in_the_memory_of_the_base_is_refused(*, atomic: bool) -> None:
    """Else the adapter would count twice in src, and once more at every call."""
    src = lora(Net())
    before = {name: value.clone() for name, value in src.state_dict().items()}
    weight, bias = src.base_model.model.up.base_layer.weight, src.base_model.model.up.bias
    dst = {"up.weight": weight.detach(), "up.bias": bias.detach()}
    with pytest.raises(anyrank.LoadError, match=r"up\.weight: shares memory with .* of the source"):
        anyrank.sync(dst, src, merge=True, unexpected="ignore", atomic=atomic)
    assert all(torch.equal(before[name], value) for name, value in src.state_dict().items())
    dst["up.weight"] = torch.empty_like(weight)  # the bias may stay: it gets its own values
    anyrank.sync(dst, src, merge=True, unexpected="ignore", atomic=atomic)
    assert torch.equal(dst["up.weight"], expected_of(src)["up.weight"])


def dora() -> Any:
    return lora(Net(), use_dora=True)


def disabled() -> Any:
    model = lora(Net())
    model.base_model.disable_adapter_layers()
    return model


def tied() -> Any:
    net = Net()
    net.head.weight = net.embed.weight
    return lora(net, target_modules=["embed"])


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Conv2d(2, 2, 1)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings", "ignore:Model has")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (dora, "has DoraLinearVariant, but merge=True supports only plain LoRA; merge with PEFT"),
        (lambda: lora(Net(), lora_bias=True), "has lora_bias"),
        (lambda: lora(Convolution()), "belongs to a peft.tuners.lora.layer.Conv2d"),
        (
            lambda: get_peft_model(Net(), IA3Config(target_modules=["up"], feedforward_modules=[])),
            "belongs to a peft.tuners.ia3.layer.Linear",
        ),
        (disabled, "its adapters are disabled"),
        (tied, "embed.weight: is tied with head.weight"),
        (Net, "merge=True needs an active PEFT adapter in src"),
    ],
)
def test_what_is_no_plain_lora_is_refused_by_name(make: Any, words: str) -> None:
    src = make()
    dst = Convolution() if words.endswith("Conv2d") else Net()
    before = [parameter.clone() for parameter in dst.parameters()]
    with pytest.raises(anyrank.LoadError) as caught:
        anyrank.sync(dst, src, merge=True)
    assert words in str(caught.value)
    assert all(map(torch.equal, before, dst.parameters()))


def test_a_dst_with_an_adapter_of_its_own_is_refused() -> None:
    with pytest.raises(anyrank.LoadError, match="merge=True, but dst has an adapter too"):
        anyrank.sync(lora(Net()), lora(Net()), merge=True)
    with pytest.raises(anyrank.LoadError, match="Sync with merge=True"):
        anyrank.sync(Net(), lora(Net()))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tiles_cover_a_box_and_are_cut_by_the_shape_alone(data: Any) -> None:
    shape = data.draw(st.tuples(st.integers(1, 200), st.integers(1, 9000)))
    low = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [
        data.draw(st.integers(1, size - start)) for size, start in zip(shape, low, strict=True)
    ]
    box = Box(tuple(low), tuple(sizes))
    every = list(tiles(shape, Box.whole(shape)))
    touched = list(tiles(shape, box))
    common = [part for tile in every if (part := tile.intersect(box))]
    assert touched == [tile for tile in every if tile.intersect(box)]
    assert sum(part.numel for part in common) == box.numel
    assert sum(tile.numel for tile in every) == shape[0] * shape[1]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 130), st.integers(1, 5000), st.integers(1, 64), st.booleans())
def test_a_product_by_tile_has_the_bits_of_the_whole(
    rows: int, columns: int, rank: int, transposed: bool
) -> None:
    a, b = torch.randn(rank, columns), torch.randn(rows, rank)
    whole = (b @ a).T * 0.7 if transposed else b @ a * 0.7
    for tile in tiles(whole.shape, Box.whole(whole.shape)):
        part = product(a, b, tile, 0.7, transposed=transposed)
        assert torch.equal(part, whole[tile.slices()])


def test_the_same_factors_at_another_scale_are_another_model() -> None:
    src, dst = lora(Net(), lora_alpha=8), lora(Net(), lora_alpha=16)
    with pytest.raises(anyrank.LoadError, match="is scaled by 2 in src, but by 4 in dst"):
        anyrank.sync(dst, src)
    dst.base_model.model.up.scaling["default"] = 2.0
    anyrank.sync(dst, src)
    tokens = torch.arange(4)
    assert torch.equal(dst(tokens), src(tokens))
