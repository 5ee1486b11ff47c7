"""A `Sync` on ranks sees that a model was sharded, gathered or given another mesh between calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tests.ranks.sharded_nets import Net, locals_of
from tests.ranks.spies import meetings
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import anyrank
from anyrank.testing import run_ranks

PLANNED = [True, False, True, False, True, True, True, True]
SIZES = {"width": 7, "hidden": 9}


def test_layouts_that_change_between_two_calls_are_seen() -> None:
    assert run_ranks(2, change_layouts, timeout=60) == [PLANNED] * 2


def change_layouts() -> list[bool]:
    torch.manual_seed(dist.get_rank())
    src, dst = Net(**SIZES), Net(**SIZES)
    for tensor in (*src.parameters(), *src.buffers()):
        dist.broadcast(tensor.detach(), 0)
    wanted = {name: p.detach().clone() for name, p in src.named_parameters()}
    planned: list[bool] = []
    weights = anyrank.Sync(dst, src)

    def sync() -> None:
        with torch.no_grad():
            for local in locals_of(dst).values():
                local.zero_()
        planned.append(weights().is_planned)
        for name, parameter in dst.named_parameters():
            held: Any = parameter.detach()
            whole = held.full_tensor() if hasattr(held, "full_tensor") else held
            assert torch.equal(whole, wanted[name]), name

    sync()
    sync()
    fully_shard(dst)
    sync()
    unit: Any = dst
    unit.unshard()
    sync()  # what is gathered is no other layout: the optimizer has the shares
    fully_shard(src)
    sync()
    name, old = next(iter(src.named_parameters()))
    owner, _, attribute = name.rpartition(".")

    def put(whole: torch.Tensor, mesh: Any, placements: Any) -> None:
        new = torch.nn.Parameter(distribute_tensor(whole, mesh, placements))
        setattr(src.get_submodule(owner), attribute, new)
        sync()

    held: Any = old
    put(wanted[name].double(), held.device_mesh, held.placements)
    for ranks in ([[0], [1]], [[0, 1]]):  # the same placements on another mesh
        put(wanted[name], DeviceMesh("cpu", ranks), [Shard(0), Replicate()])
    return planned


def change_one_rank() -> list[Any]:
    """Each rank in turn changes what it has; what the calls answer on this rank."""
    rank = dist.get_rank()
    src = Net(**SIZES) if rank == 0 else None
    dst: Any = {name: torch.zeros_like(t) for name, t in Net(**SIZES).state_dict().items()}
    dst = dst if rank == 1 else None
    weights = anyrank.Sync(dst, src)
    found: list[Any] = [weights().is_planned, weights().is_planned]
    if dst is not None:
        name = next(iter(dst))
        dst[name] = torch.zeros(dst[name].shape, dtype=torch.float64)
    found += [weights().is_planned, weights().is_planned]
    if src is not None:
        src.double()
    found += [weights().is_planned, weights.version]
    if dst is not None:
        dst["more"] = torch.zeros(1)
    try:
        weights()
    except anyrank.LoadError as error:
        found += [str(error), weights.version]
        if dst is not None:
            del dst["more"]
    return [*found, weights().is_planned, weights.version]


def test_what_changed_on_one_rank_is_seen_on_all() -> None:
    one, other, idle = run_ranks(3, change_one_rank, timeout=60)
    assert one == other == idle
    assert one[:6] == [True, False, True, False, True, 5]
    assert "missing from the source (1):\n  more" in one[6]
    assert one[7:] == [5, False, 6]


def use_two_objects() -> list[bool]:
    """Two objects for the same ends, which the ranks call in turn and one time not alike."""
    src, dst = Net(**SIZES), Net(**SIZES)
    first, second = anyrank.Sync(dst, src), anyrank.Sync(dst, src)
    planned = [weights().is_planned for weights in (first, second, first, second)]
    crossed = (first, second) if dist.get_rank() else (second, first)
    return planned + [weights().is_planned for weights in (crossed[0], first)]


def test_ranks_that_call_other_objects_for_the_same_ends_use_the_same_plan() -> None:
    one, other = run_ranks(2, use_two_objects, timeout=60)
    assert one == other == [True, True, False, False, False, False]


def agreements() -> list[list[str]]:
    """What the ranks meet for in a first and in a later call."""
    src, dst = Net(**SIZES), Net(**SIZES)
    fully_shard(dst)
    weights = anyrank.Sync(dst, src)
    met: list[list[str]] = []
    for _ in range(2):
        with meetings() as found:
            weights()
        met.append(found)
    return met


def test_a_later_call_meets_four_times() -> None:
    for first, later in run_ranks(2, agreements, timeout=60):
        assert len(first[first.index("sync()") :]) <= 9, first
        assert later[later.index("sync()") :] == [
            "sync()",
            "allocating memory",
            "passing on the weights",
            "putting the weights in place",
        ]


def lay_otherwise() -> list[bool]:
    """Three ranks, FSDP2 on two of them into a whole on the last, whose memory changes its lie."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    wanted = [torch.randn(6, 8), torch.randn(6, 8).bfloat16()]
    mesh = DeviceMesh("cpu", [0, 1])
    src = dst = None
    if rank < 2:
        src = {str(n): distribute_tensor(w, mesh, [Shard(n)]) for n, w in enumerate(wanted)}
    else:
        dst = {str(n): torch.empty(6, 8) for n in range(2)}
    weights = anyrank.Sync(dst, src)
    planned: list[bool] = []
    for lie in (
        lambda: torch.empty(6, 8),
        lambda: torch.empty(8, 6).t(),
        lambda: torch.empty(6, 16)[:, ::2],
        lambda: torch.empty(6, 8),
    ):
        for name in dst or {}:
            dst[name] = lie()  # pyright: ignore[reportOptionalSubscript]
        planned.append(weights().is_planned)
        for name, tensor in (dst or {}).items():
            assert torch.equal(tensor, wanted[int(name)].float())
    return planned


def test_memory_that_lies_otherwise_keeps_the_plan() -> None:
    assert run_ranks(3, lay_otherwise) == [[True, False, False, False]] * 3
