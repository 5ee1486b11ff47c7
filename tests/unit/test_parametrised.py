"""First values of parametrised modules on meta: what torch gives them, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import anyrank


class Symmetric(nn.Module):
    """Has no right_inverse: the tensor itself is kept."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


class Scaled(nn.Module):
    """Twice what it is computed from."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


def both(module: nn.Module) -> nn.Module:
    return parametrizations.weight_norm(
        parametrize.register_parametrization(module, "bias", Scaled()), "weight"
    )


def stacked(module: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, "weight", Scaled())
    return parametrize.register_parametrization(module, "weight", Scaled())


KINDS: dict[str, Callable[[Any], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "weight_norm of a column": lambda m: parametrizations.weight_norm(m, dim=1),
    "orthogonal": lambda m: parametrizations.orthogonal(m, use_trivialization=False),
    "householder": lambda m: parametrizations.orthogonal(
        m, orthogonal_map="householder", use_trivialization=False
    ),
    "of the user": lambda m: parametrize.register_parametrization(m, "weight", Symmetric()),
    "weight and bias": both,
    "two of one tensor": stacked,
}


def net(change: Callable[[Any], nn.Module]) -> Any:
    return nn.Sequential(nn.Sequential(change(nn.Linear(4, 4))), nn.BatchNorm1d(4))


@pytest.mark.parametrize("call", ["materialize", "load"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_plain_module_parametrised(kind: str, call: str) -> None:
    models: list[Any] = []
    for change in (lambda m: m, KINDS[kind]):
        with anyrank.meta():
            model = net(change)
        torch.manual_seed(3)
        if call == "materialize":
            anyrank.materialize(model, device="cpu")
        else:
            anyrank.load(model, {"1.weight": torch.ones(4)}, missing="init")
        models.append(model)
    plain, model = models
    expected = plain
    expected[0][0] = KINDS[kind](plain[0][0])
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), name
    assert torch.equal(model[0][0].weight, expected[0][0].weight)


def test_what_a_parametrisation_computes_for_itself_is_refused_by_name() -> None:
    with anyrank.meta():
        model = net(parametrizations.spectral_norm)
    with pytest.raises(anyrank.LoadError, match=r"0\.0\.parametrizations\.weight\.0\._u"):
        anyrank.materialize(model)
    assert model[0][0].parametrizations.weight.original.is_meta


class NoWayBack(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            raise RuntimeError("never of a real tensor")
        return x


def test_a_parametrisation_that_fails_is_named() -> None:
    with anyrank.meta():
        model = net(lambda m: parametrize.register_parametrization(m, "weight", NoWayBack()))
    with pytest.raises(
        anyrank.LoadError, match=r"(?s)0\.0\.parametrizations\.weight\.original: its"
    ):
        anyrank.materialize(model)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_rule_of_the_users_is_given_the_module_as_it_was() -> None:
    with anyrank.meta():
        model = net(parametrizations.weight_norm)

    def init(module: Any) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 3)

    anyrank.materialize(model, init=init)
    assert (model[0][0].weight - 3).abs().max() < 1e-6
    assert (model[0][0].parametrizations.weight.original0 == 6).all()


def test_transformers_rules_know_it_too() -> None:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    config = Wav2Vec2Config(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        conv_dim=(8, 8),
        conv_stride=(2, 2),
        conv_kernel=(3, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    with anyrank.meta():
        model: Any = Wav2Vec2Model(config)
    anyrank.materialize(model, device="cpu")
    conv = model.encoder.pos_conv_embed.conv
    assert torch.isfinite(conv.weight).all()
    assert float(conv.weight.detach().std()) > 0
    table = conv.parametrizations.weight
    norms = torch.norm_except_dim(table.original1, 2, 2)
    torch.testing.assert_close(table.original0, norms)
