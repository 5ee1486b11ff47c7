"""recompute, tile and tiled_loss under whatever torch does with a model: as without them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.offloads import offload_of_cpu
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
    def as_head(self) -> nn.Module:
        return self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.block(x)
        return anyrank.tiled_loss(self.as_head(), x, Y[: len(x)], chunk_size=3)


class Recomputed(TiledNet):
    def as_head(self) -> nn.Module:
        return nn.Sequential(self.head)


def offload() -> anyrank.Offload:
    return offload_of_cpu(1 << 20, keep_last=0)


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


def pair(way: str) -> tuple[Net, Net]:
    """The plain model, and the same one with a way."""
    torch.manual_seed(0)
    kind, patch = WAYS[way]
    plain, ours = Net(), kind()
    ours.load_state_dict(copy.deepcopy(plain.state_dict()))
    patch(ours)
    return plain, ours


def gradients(net: Any, x: torch.Tensor = X, **options: Any) -> list[torch.Tensor]:
    """The loss, and the gradients of all parameters."""
    loss = net(x)
    return [loss, *torch.autograd.grad(loss, [*net.parameters()], **options)]


def assert_close(
    ours: Iterable[torch.Tensor], plain: Iterable[torch.Tensor], **options: float
) -> None:
    for mine, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, wanted, **(options or {"rtol": 1e-11, "atol": 1e-12}))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch 2.13, in jvp
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("way", WAYS)
def test_a_transform_gives_what_it_gives_without(way: str, transform: str) -> None:
    plain, ours = pair(way)
    assert_close(TRANSFORMS[transform](ours), TRANSFORMS[transform](plain))


# torch 2.13 asks for .grad of a compiled function's arguments, and silences the warning by a log
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("way", WAYS)
def test_a_compiler_gives_what_it_gives_without(way: str, where: str) -> None:
    torch.compiler.reset()
    plain, ours = pair(way)
    if where == "inside":
        ours.block[0] = torch.compile(ours.block[0], backend="aot_eager")
        assert_close(gradients(ours), gradients(plain))
    else:
        assert_close(gradients(torch.compile(ours, backend="aot_eager")), gradients(plain))
    torch.compiler.reset()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("way", WAYS)
def test_without_gradients_it_is_the_plain_model(way: str, mode: Callable[[], Any]) -> None:
    plain, ours = pair(way)
    with mode():
        assert_close([ours(X)], [plain(X)])


@pytest.mark.parametrize("way", [way for way in WAYS if way != "tiled_loss"])
def test_backward_may_run_twice_and_through_itself(way: str) -> None:
    """All but a fused loss, which says that it is differentiated once."""

    def penalty(net: Net) -> list[torch.Tensor]:
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(x), x, create_graph=True)
        return list(torch.autograd.grad(slope.pow(2).sum(), [x, *net.block.parameters()]))

    plain, ours = pair(way)
    assert_close(penalty(ours), penalty(plain))
    loss, *first = gradients(ours, retain_graph=True)
    assert_close(torch.autograd.grad(loss, [*ours.parameters()]), first)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_autocast_of_the_forward_pass_is_in_force_wherever_it_is_run_again(
    way: str, outside: bool
) -> None:
    dtypes: set[torch.dtype] = set()
    found: list[list[torch.Tensor]] = []
    for net in pair(way):
        net.float()
        for layer in (net.block[0], net.head):
            layer.register_forward_hook(lambda _, args, out: dtypes.add(out.dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not outside):
            loss = net(X.float())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
            found.append([loss, *torch.autograd.grad(loss, [*net.parameters()])])
    assert dtypes == {torch.float32 if outside else torch.bfloat16}
    assert_close(*found, rtol=2e-2, atol=2e-3)
