"""Where live weights go wrong in silence elsewhere: here each is right, or a clear error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import anyrank
from anyrank.loading.sharing import move
from anyrank.testing import Died, Fault, run_ranks


class Tied(nn.Module):
    """A head that is its embedding, or a copy of it."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def refused(words: str, call: Callable[[], Any]) -> None:
    """The call is refused on this rank, in these words."""
    with pytest.raises(anyrank.LoadError) as caught:
        call()
    assert words in str(caught.value), str(caught.value)


def on(rank: int, model: Any) -> Any:
    return model if dist.get_rank() == rank else None


def job_tie() -> None:
    dst, src = Tied(True), Tied(True)
    report = anyrank.sync(on(1, dst), on(0, src))
    assert report.tied == {"embed.weight": ["head.weight"]}
    assert report.tensors == 1
    apart = Tied(False)
    assert anyrank.sync(on(1, apart), on(0, src)).tensors == 2  # both names get the one tensor
    if dist.get_rank() == 1:
        assert torch.equal(apart.head.weight, apart.embed.weight)
        assert dst.head.weight is dst.embed.weight
    words = "head.weight and embed.weight are tied in dst, but have different values in src"
    refused(words, lambda: anyrank.sync(on(1, dst), on(0, Tied(False))))
    with torch.no_grad():
        apart.head.weight.copy_(apart.embed.weight)
    report = anyrank.sync(on(0, dst), on(1, apart))
    assert report.duplicates == {"head.weight": "embed.weight"}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def lora(seed: int) -> Any:
    """A model with an adapter that changes what it computes."""
    torch.manual_seed(seed)
    model = get_peft_model(net(), LoraConfig(r=2, target_modules=["0", "2"]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def job_adapter() -> None:
    src, plain = lora(0), net()
    for unexpected in ("error", "ignore"):
        refused(
            "src has 4 PEFT adapter tensors (such as ",
            partial(anyrank.sync, on(1, plain), on(0, src), unexpected=unexpected),
        )
    twin = lora(1)
    anyrank.sync(on(1, twin), on(0, src))
    x = torch.ones(2, 4)
    if dist.get_rank() == 1:
        assert torch.equal(twin(x), src(x))
    src.merge_adapter()  # its base weights hold the adapter now, and its adapter is there as well
    refused(
        "the adapter is merged into the base weights in src",
        lambda: anyrank.sync(on(1, twin), on(0, src)),
    )


def job_buffer() -> None:
    torch.manual_seed(dist.get_rank())
    src, dst = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    src.running_mean.normal_()  # as under DDP without broadcast_buffers
    src.num_batches_tracked.fill_(7)
    anyrank.sync(dst, src)
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, (src.running_mean, dst.running_mean, dst.num_batches_tracked))
    assert torch.equal(everyone[1][1], everyone[0][0])  # the first rank's, on all ranks
    assert torch.equal(everyone[0][1], everyone[0][0])
    assert int(dst.num_batches_tracked) == 7


def job_dtype() -> None:
    src, dst = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()
    report = anyrank.sync(on(1, dst), on(0, src))
    assert report.cast["weight"] == "float32 -> bfloat16"
    assert report.bytes_sent == [20 * 2, 0]  # the smaller dtype crosses
    back = nn.Linear(4, 4)
    assert anyrank.sync(on(0, back), on(1, dst)).bytes_sent == [0, 20 * 2]
    if dist.get_rank() == 0:
        assert torch.equal(back.weight, src.weight.bfloat16().float())
    whole = {"weight": torch.zeros(4, 4, dtype=torch.int64), "bias": torch.zeros(4)}
    words = "the source has torch.float32 (weight), but the model has torch.int64"
    refused(words, lambda: anyrank.sync(on(1, whole), on(0, src)))


def job_frozen() -> None:
    torch.manual_seed(0)
    src, dst = net(), net()
    before = dst[0].weight.clone()
    anyrank.freeze(dst[0], source="elsewhere.safetensors")
    words = "0.bias, 0.weight: frozen in dst, but src has different values"
    refused(words, lambda: anyrank.sync(on(1, dst), on(0, src)))
    assert torch.equal(dst[0].weight, before)
    src[0].load_state_dict(dst[0].state_dict())
    report = anyrank.sync(on(1, dst), on(0, src))
    assert report.frozen == ["0.weight", "0.bias"]
    fixed = net().requires_grad_(False)  # not trained, and weights all the same
    anyrank.freeze(fixed[0])  # without a source: given what src has, as from a file
    anyrank.sync(on(1, fixed), on(0, src))
    if dist.get_rank() == 1:
        assert torch.equal(dst[2].weight, fixed[2].weight)
        assert torch.equal(dst[0].weight, fixed[0].weight)
        assert not fixed[0].weight.requires_grad


def job_rename() -> None:
    src, dst = nn.ModuleDict({"actor": net()}), net()
    words = "missing from the source (4):"
    refused(words, lambda: anyrank.sync(dst, src))
    for rename in ({"actor": ""}, [("^actor[.]", "")], lambda key: key.removeprefix("actor.")):
        report = anyrank.sync(on(1, dst), on(0, src), rename=rename)
        assert report.renamed["0.weight"] == "actor.0.weight"
    odd: Any = (lambda key: key) if dist.get_rank() else (lambda key: key.removeprefix("actor."))
    both = net()
    refused("rename", lambda: anyrank.sync(both, src, rename=odd, unexpected="ignore"))


def job_uneven() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    torch.manual_seed(0)
    full = nn.Linear(3, 1)  # one row: rank 1 has none
    src = fully_shard(copy.deepcopy(full), mesh=mesh)
    dst = nn.Linear(3, 1)
    report = anyrank.sync(dst, src, verify=True)
    assert torch.equal(dst.weight, full.weight)
    assert report.bytes_sent == [16, 0]
    empty = {"x": torch.empty(0, 3), "y": torch.ones(2)}
    assert anyrank.sync({key: value.clone() for key, value in empty.items()}, empty).tensors == 2


def job_missing() -> None:
    src, dst = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
    words = "missing from the source (1):\n  bias"
    refused(words, lambda: anyrank.sync(on(1, dst), on(0, src)))
    before = dst.bias.clone()
    report = anyrank.sync(on(1, dst), on(0, src), missing="keep")
    assert report.missing == report.kept == ["bias"]
    assert torch.equal(dst.bias, before)
    words = "unexpected in the source (1):\n  bias"
    refused(words, lambda: anyrank.sync(on(0, src), on(1, dst)))
    assert anyrank.sync(on(0, src), on(1, dst), unexpected="ignore").unexpected == ["bias"]


def job_disagree() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    src: Any = fully_shard(net(), mesh=mesh) if dist.get_rank() else net()
    dst = net()
    refused("ranks hold it in different ways in src", lambda: anyrank.sync(dst, src))
    other = parallelize_module(net(), mesh, {"0": ColwiseParallel()}, src_data_rank=None)
    full = {k: v.clone() for k, v in net().state_dict().items()}
    # Ranks may want different layouts of dst: each gets what it asked for.
    torch.manual_seed(0)
    same = net()
    mine: Any = other if dist.get_rank() else full
    anyrank.sync(mine, on(0, same), verify=True)
    state = same.state_dict()
    if dist.get_rank():
        assert torch.equal(other[0].weight.to_local(), state["0.weight"][4:])
    else:
        assert torch.equal(full["0.weight"], state["0.weight"])


def job_permuted() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), mesh=mesh)
    swap: dict[str, Any] = {"rename": {"0": "1", "1": "0"}, "verify": True}
    a, b = (layer.weight.full_tensor().clone() for layer in model)
    refused("shares memory with", lambda: anyrank.sync(model, model, **swap))
    refused("shares memory with", lambda: anyrank.load(model, model.state_dict(), **swap))
    assert torch.equal(model[0].weight.full_tensor(), a)
    anyrank.sync(model, model, atomic=True, **swap)
    assert torch.equal(model[0].weight.full_tensor(), b)
    assert torch.equal(model[1].weight.full_tensor(), a)


def job_differing_replicas() -> None:
    torch.manual_seed(dist.get_rank())
    src, dst = net(), net()
    refused("4 tensors differ between replicas", lambda: anyrank.sync(dst, src, verify=True))


def job_inference() -> None:
    src, dst = net(), net()
    with torch.inference_mode():
        anyrank.sync(dst, src)
    assert torch.equal(dst[0].weight, src[0].weight)
    assert dst[0].weight.requires_grad


def job_mesh_in_another_order() -> None:
    """FSDP2 cuts in the order of the process group, torch's placements in that of the mesh."""
    dst = nn.Linear(4, 4)
    ordered = fully_shard(nn.Linear(4, 4), mesh=DeviceMesh("cpu", [0, 1]))
    anyrank.sync(dst, ordered)  # of the same shape: what was found of it does not excuse the next
    turned = fully_shard(nn.Linear(4, 4), mesh=DeviceMesh("cpu", [1, 0]))
    before = turned.weight.full_tensor()
    words = "weight: this rank has position 1 on axis 0 of its mesh, but position 0 in that"
    refused(words, lambda: anyrank.sync(dst, turned))
    refused(words, lambda: anyrank.sync(turned, dst))
    refused(words, lambda: anyrank.load(turned, dst.state_dict()))
    assert torch.equal(turned.weight.full_tensor(), before)


def job_part_of_src_is_missing() -> None:
    src = fully_shard(nn.Linear(4, 4))
    refused(
        "weight: the source's ranks hold only 8 of the 16 elements",
        lambda: anyrank.sync(nn.Linear(4, 4), on(0, src)),
    )


def job_part_of_dst_is_missing() -> None:
    dst, src = fully_shard(nn.Linear(4, 4, bias=False)), nn.Linear(4, 4, bias=False)
    before = dst.weight.to_local().clone()
    words = "weight: dst is sharded over 2 ranks, but only 1 of them passed it"
    refused(words, lambda: anyrank.sync(on(1, dst), src))
    assert torch.equal(dst.weight.to_local(), before)
    anyrank.sync(dst, src, process_group=anyrank.ALONE)  # each rank has its own call
    assert torch.equal(dst.weight.to_local(), src.weight.chunk(2)[dist.get_rank()])


def job_no_group() -> None:
    both, first = dist.new_group([0, 1]), dist.new_group([0])
    dist.barrier()  # torch's own groups have none: the peer may still be connecting to them
    dist.destroy_process_group(both)
    not_groups: list[Any] = [[0, 1], both]
    for group in not_groups:
        with pytest.raises(
            TypeError, match=r"expected a torch\.distributed group .* not been destroyed"
        ):
            anyrank.sync(net(), net(), process_group=group)
    if dist.get_rank() == 1:
        with pytest.raises(anyrank.RankError, match="rank 1 is not a member of process_group="):
            anyrank.sync(net(), net(), process_group=first)


JOBS = {name.removeprefix("job_"): job for name, job in globals().items() if name[:4] == "job_"}


@pytest.mark.parametrize("name", JOBS)
def test_it_is_right_or_refused(name: str) -> None:
    run_ranks(2, JOBS[name])


def job_dies(atomic: bool) -> Any:
    torch.manual_seed(dist.get_rank())
    src, dst = on(0, nn.Linear(16, 64)), on(1, nn.Linear(16, 64))
    before = [p.clone() for p in dst.parameters()] if dst is not None else []
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(move, "MESSAGE_BYTES", 64)  # 68 messages
            anyrank.sync(dst, src, atomic=atomic)
    except anyrank.RankError as error:
        kept = dst is not None and all(map(torch.equal, before, dst.parameters()))
        return str(error), kept
    return "no error"


@pytest.mark.parametrize("nth", [1, 20])
@pytest.mark.parametrize("atomic", [False, True])
def test_a_rank_that_dies_leaves_word_of_what_dst_is(atomic: bool, nth: int) -> None:
    rank, point = (0, "sync.send") if nth == 1 or atomic else (1, "sync.receive")
    results = run_ranks(2, job_dies, atomic, faults=[Fault(rank, point, how="kill", nth=nth)])
    assert isinstance(results[rank], Died)
    text, kept = results[1 - rank]
    assert f"rank {rank}" in text
    assert ("dst keeps its values" if atomic else "partly overwritten; sync again") in text
    assert kept or rank == 1 or not atomic
