"""recompute, tile and tiled_loss under torch.func and forward-mode differentiation: as without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, stack_module_state, vmap

import anyrank

D = torch.float64
X, TANGENT = torch.randn(2, 5, 4, dtype=D), torch.randn(2, 5, 4, dtype=D)
Y = torch.randint(4, (2, 5))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(D)
        self.head = nn.Linear(4, 4).to(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), Y[: len(x)].flatten())


class TiledNet(Net):
    impl: Any = "auto"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.block(x)
        return anyrank.tiled_loss(self.head, x, Y[: len(x)], chunk_size=3, impl=self.impl)


class Recomputed(TiledNet):
    impl = "recompute"


def offload() -> anyrank.Offload:
    return anyrank.Offload(1 << 20, min_bytes=1, keep_last=0, force=True)


WAYS: dict[str, tuple[type[Net], Callable[[Net], object]]] = {
    "recompute_": (Net, lambda net: anyrank.recompute_(net, "block")),
    "offload": (Net, lambda net: anyrank.recompute_(net, "block", offload=offload())),
    "tile_": (Net, lambda net: anyrank.tile_(net, "block", chunk_size=2)),
    "wide tile_": (Net, lambda net: anyrank.tile_(net, "block", chunk_size=2, grad_dtype=D)),
    "tiled_loss": (TiledNet, lambda net: None),
    "recomputed loss": (Recomputed, lambda net: None),
}


def weights(net: Net) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def per_sample(net: Net) -> Iterable[torch.Tensor]:
    def loss(given: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(net, given, (x[None],))

    return vmap(grad(loss), in_dims=(None, 0))(weights(net), X).values()


def ensemble(net: Net) -> Iterable[torch.Tensor]:
    given = stack_module_state([net, net])  # type: ignore[list-item]
    return [vmap(lambda p, b: functional_call(net, (p, b), (X,)))(*given)]


def dual(net: Net) -> Iterable[torch.Tensor]:
    with forward_ad.dual_level():
        return [forward_ad.unpack_dual(net(forward_ad.make_dual(X, TANGENT))).tangent]


TRANSFORMS: dict[str, Callable[[Net], Iterable[torch.Tensor]]] = {
    "vmap of grad": per_sample,
    "vmap of models": ensemble,
    "grad": lambda net: grad(lambda p: functional_call(net, p, (X,)))(weights(net)).values(),
    "hessian": lambda net: [hessian(net)(X[:1])],
    "jvp": lambda net: jvp(net, (X,), (TANGENT,)),
    "dual numbers": dual,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.")
@pytest.mark.parametrize("way", WAYS)
def test_a_trace_is_of_the_plain_model(way: str) -> None:
    kind, patch = WAYS[way]
    net = kind()
    patch(net)
    traced = torch.jit.trace(net.block, X)
    longer = torch.cat([X, X], 1)
    torch.testing.assert_close(traced(longer), net.block.forward(longer), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch 2.13, in jvp
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("way", WAYS)
def test_a_transform_gives_what_it_gives_without(way: str, transform: str) -> None:
    torch.manual_seed(0)
    kind, patch = WAYS[way]
    plain, ours = Net(), kind()
    ours.load_state_dict(copy.deepcopy(plain.state_dict()))
    patch(ours)
    pairs = zip(TRANSFORMS[transform](ours), TRANSFORMS[transform](plain), strict=True)
    for mine, wanted in pairs:
        torch.testing.assert_close(mine, wanted, rtol=1e-11, atol=1e-12)
