"""The channel from device to device, over gloo on CPU ranks: rounds of one all-to-all on a group of
its own, right in every layout, the same error on all ranks wherever one fails.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.live.test_sync import CASES, job_pairs
from tests.ranks.test_promise_4_one_ranks_error import SECONDS, agreed, outcome
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import anyrank
from anyrank.live import device_channel, device_group
from anyrank.loading.sharing.passing import Passing
from anyrank.testing import Died, Fault, run_ranks
from anyrank.world.connections import Connections
from anyrank.world.connections import _close as close  # pyright: ignore[reportPrivateUsage]

BUFFER = 4096


@dataclass
class Log:
    """What the channel asked of its group on this rank."""

    opened: int = 0
    aborted: int = 0
    rounds: list[tuple[list[int], list[int]]] = field(default_factory=list)


class Spied:
    """A group of gloo's, as a channel uses one: nothing else may be called."""

    def __init__(self, group: Any, log: Log) -> None:
        self.group, self.log = group, log

    def alltoall_base(self, target: Any, source: Any, outs: list[int], ins: list[int]) -> Any:
        assert target.dtype == source.dtype == torch.uint8
        self.log.rounds.append((outs, ins))
        return self.group.alltoall_base(target, source, outs, ins)

    def abort(self) -> None:
        self.log.aborted += 1
        close(self.group, self.group.rank(), self.group.size())  # gloo has no abort of its own


@contextmanager
def channel_on(from_bytes: int = 0, buffer_bytes: int = BUFFER) -> Generator[Log]:
    """All ranks take the channel, as if each had a device of its own."""
    log = Log()

    def open_raw(store: Any, index: int, size: int) -> Any:
        log.opened += 1
        return Spied(dist.ProcessGroupGloo(store, index, size, timedelta(seconds=30)), log)

    name = f"gloo {id(log)}"  # a group of this test's own, under one name on all ranks
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, name)
    kind = device_channel.ChannelKind(names[0], open_raw, from_bytes, buffer_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_channel, "choose_channel", lambda devices: kind)
        yield log


def job_with_channel(job: Callable[..., Any], *args: Any, buffer_bytes: int = BUFFER) -> int:
    with channel_on(buffer_bytes=buffer_bytes) as log:
        job(*args)
    return len(log.rounds)


@pytest.mark.parametrize("buffer_bytes", [64, BUFFER])
def test_values_are_right_in_every_layout(buffer_bytes: int) -> None:
    counts = run_ranks(
        4, job_with_channel, job_pairs, CASES, buffer_bytes=buffer_bytes, timeout=120
    )
    assert counts == [counts[0]] * 4  # every rank is in every round
    assert counts[0] > len(CASES)


def tensors(rank: int) -> tuple[dict[str, torch.Tensor] | None, dict[str, torch.Tensor] | None]:
    """Rank 0 has src, ranks 1 and 2 dst, one of them narrower; many dtypes, odd sizes."""
    torch.manual_seed(0)
    whole = {
        "wide": torch.randn(40, 33),
        "turned": torch.randn(33, 40).t(),
        "narrow": torch.randn(7, 11).bfloat16(),
        "float8": torch.randn(13, 5).to(torch.float8_e4m3fn),
        "double": torch.randn(3, dtype=torch.float64),
        "flags": torch.rand(17) > 0.5,
        "count": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "complex": torch.randn(9, dtype=torch.complex64),
    }
    if rank == 0:
        return None, whole
    dtypes = {"wide": torch.bfloat16} if rank == 2 else {"narrow": torch.float32}
    dst = {n: torch.zeros(t.shape, dtype=dtypes.get(n, t.dtype)) for n, t in whole.items()}
    return dst, None


def job_dtypes(verify: bool, atomic: bool) -> Any:
    dst, src = tensors(dist.get_rank())
    _, wanted = tensors(0)
    assert wanted is not None
    with channel_on() as log:
        weights = anyrank.Sync(dst, src, verify=verify, atomic=atomic)
        reports = [weights() for _ in range(3)]
        for name, tensor in (dst or {}).items():
            assert torch.equal(tensor.float(), wanted[name].to(tensor.dtype).float()), name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_channel, "choose_channel", lambda devices: None)
        plain = anyrank.sync(dst, src)
    assert [r.is_planned for r in reports] == [True, False, False]
    assert reports[0].channel == log_name(reports[0])
    assert plain.channel == ""
    assert reports[0].bytes_sent == reports[2].bytes_sent == plain.bytes_sent
    assert reports[0].bytes_received == plain.bytes_received
    assert max(reports[0].channel_bytes) <= 4 * BUFFER
    return log.opened, len(log.rounds), [sum(ins) <= BUFFER for _, ins in log.rounds]


def log_name(report: anyrank.SyncReport) -> str:
    assert report.channel.startswith("gloo ")
    return report.channel


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_dtypes_casts_and_bytes_are_those_of_gloo(verify: bool, atomic: bool) -> None:
    results = run_ranks(3, job_dtypes, verify, atomic)
    # To each of two ranks 5,280 or 2,640 bytes of "wide", in slots of 2,048 bytes.
    assert {(opened, rounds) for opened, rounds, _ in results} == {(1, 1 + 3 * 6)}
    assert all(all(fits) for *_, fits in results)


def job_rounds(rows: int) -> int:
    """FSDP2-like rows on all ranks to rank 0: rank 0 sends nothing, and is in every round."""
    mesh = DeviceMesh("cpu", [0, 1, 2])
    whole = torch.arange(float(rows * 64)).view(rows, 64)
    src = {"w": distribute_tensor(whole, mesh, [Shard(0)])}
    dst = {"w": torch.zeros(rows, 64)} if dist.get_rank() == 0 else None
    with channel_on() as log:
        anyrank.sync(dst, src)
    assert dst is None or torch.equal(dst["w"], whole)
    return len(log.rounds) - 1  # the first connects


def test_rounds_are_what_the_longest_pair_takes() -> None:
    # A third of the rows from each of two peers: 96 x 64 x 4 bytes in slots of 2,048.
    assert run_ranks(3, job_rounds, 288) == [12] * 3
    assert run_ranks(3, job_rounds, 3) == [1] * 3


def job_opened() -> list[int]:
    dst, src = tensors(dist.get_rank())
    counts: list[int] = []
    with channel_on(from_bytes=1 << 20) as log:
        anyrank.sync(dst, src)
        counts.append(log.opened)
    with channel_on() as log:
        for _ in range(2):
            anyrank.sync(dst, src)
            counts.append(log.opened)
    return [*counts, log.aborted]


def test_a_group_is_opened_when_a_call_is_large_and_kept() -> None:
    assert run_ranks(3, job_opened) == [[0, 1, 1, 0]] * 3


def job_subset() -> int:
    """Two of three ranks, while the third is elsewhere; torch's ways to make groups are shut."""
    group: Any = dist.new_group([0, 2])
    rank = dist.get_rank()
    if rank == 1:
        names: list[Any] = [None] * 3
        dist.all_gather_object(names, "")
        dist.barrier()
        return 0
    known: Any = dist.distributed_c10d._world  # pyright: ignore[reportPrivateUsage]
    groups = len(known.pg_map)
    with channel_on() as log, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", None)
        patch.setattr(Passing, "send", None)
        patch.setattr(Passing, "receive", None)
        src = {"w": torch.ones(64)} if rank == 0 else None
        dst = {"w": torch.zeros(64)} if rank else None
        anyrank.sync(dst, src, process_group=group)
        assert len(known.pg_map) == groups
    assert dst is None or torch.equal(dst["w"], torch.ones(64))
    dist.barrier()
    return len(log.rounds)


def test_a_subset_meets_no_other_rank_and_no_group_of_the_user() -> None:
    assert run_ranks(3, job_subset) == [2, 0, 2]


def job_other_splits() -> Any:
    dst, src = tensors(dist.get_rank())
    with channel_on(), pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 2:
            usual = device_channel.messages_of
            patch.setattr(
                device_channel, "messages_of", lambda f, most, piece: usual(f, most // 2, piece)
            )
        return outcome(lambda: anyrank.sync(dst, src))


def test_splits_that_differ_are_an_error_before_a_round() -> None:
    kind, text, _ = agreed(run_ranks(3, job_other_splits))
    assert kind == "RankError"
    assert "ranks 0 and 2 would cut their messages differently" in text


def job_fails(atomic: bool, again: bool = True) -> Any:
    torch.manual_seed(dist.get_rank())
    mesh = DeviceMesh("cpu", [0, 1])
    whole = torch.randn(192, 64)
    dst, src = None, None
    if dist.get_rank() < 2:
        src = {"w": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)}
    else:
        dst = {"w": torch.zeros(192, 64)}
    with channel_on() as log:
        weights = anyrank.Sync(dst, src, atomic=atomic)
        first = outcome(weights)
        kept = dst is None or not dst["w"].any()
        rounds = len(log.rounds)
        second = outcome(weights)[:2] if again else ()
    return *first, kept, rounds, second


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize(
    ("rank", "point", "nth"),
    [(1, "sync.send", 1), (1, "sync.send", 3), (2, "sync.receive", 1), (2, "sync.receive", 4)],
)
def test_an_error_on_one_rank_stops_all_at_one_round(
    rank: int, point: str, nth: int, atomic: bool
) -> None:
    results = run_ranks(3, job_fails, atomic, faults=[Fault(rank, point, how="raise", nth=nth)])
    kind, text, causes = agreed(results)
    assert (kind, list(causes)) == ("RankError", [rank])
    assert ("dst keeps its values" if atomic else "partly overwritten") in text
    assert all(kept for *_, kept, _, _ in results) or not atomic
    started = {rounds for *_, rounds, _ in results}
    assert len(started) == 1, started
    assert started.pop() <= nth + 4 < 13  # of 12, and one that connects
    assert [second[0] for *_, second in results] == ["no error"] * 3


@pytest.mark.parametrize("point", ["sync.send", "sync.receive"])
def test_a_rank_that_dies_in_a_round_is_named(point: str) -> None:
    rank = 1 if point == "sync.send" else 2
    fault = Fault(rank, point, how="kill", nth=2)
    results = run_ranks(3, job_fails, False, False, faults=[fault])
    assert isinstance(results[rank], Died)
    for n in {0, 1, 2} - {rank}:
        kind, text, causes, seconds, *_ = results[n]
        assert (kind, list(causes)) == ("RankError", [rank]), text
        assert "partly overwritten" in text
        assert seconds < SECONDS


def job_out_of_memory() -> Any:
    dst, src = tensors(dist.get_rank())
    with channel_on() as log, pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:

            def allocate(self: device_channel.ChannelRun) -> None:
                raise torch.OutOfMemoryError("no 4 KiB")

            patch.setattr(device_channel.ChannelRun, "_allocate", allocate)
        result = outcome(lambda: anyrank.sync(dst, src))
    return *result, len(log.rounds)


def test_a_rank_without_memory_for_buffers_starts_no_round() -> None:
    results = run_ranks(3, job_out_of_memory)
    kind, text, causes = agreed(results)
    assert (kind, list(causes)) == ("RankError", [1])
    assert "no 4 KiB" in text
    assert [rounds for *_, rounds in results] == [1] * 3  # the first connects


def job_stuck() -> Any:
    """Rank 1's device never comes to the end of a round: all say so, none waits for ever."""
    dst, src = tensors(dist.get_rank())
    with channel_on() as log, pytest.MonkeyPatch.context() as patch:
        usual = Connections.collective

        def collective(self: Connections, work: Any, what: str) -> Any:
            if what == device_channel.WHAT and dist.get_rank() == 1 and len(log.rounds) == 3:
                return device_group.polled(self, lambda: False, what)
            return usual(self, work, what)

        patch.setattr(Connections, "collective", collective)
        result = outcome(lambda: anyrank.sync(dst, src))
    return *result, log.aborted


def test_a_round_that_does_not_end_is_an_error_and_aborts_the_group() -> None:
    results = run_ranks(3, job_stuck, env={"ANYRANK_TIMEOUT_SEC": "3"}, timeout=60)
    assert {result[0] for result in results} == {"RankError"}
    assert [aborted for *_, aborted in results] == [1] * 3


def test_channels_are_for_devices_of_ones_own() -> None:
    first, second = "cuda:GPU-1", "cuda:GPU-2"
    kind = device_channel.choose_channel([first, second])
    assert kind is not None
    assert (kind.name, kind.from_bytes, kind.buffer_bytes) == ("nccl", 256 << 20, 32 << 20)
    for others in (
        [first, first],
        [first, ""],
        [first, "several"],
        ["", ""],
        [first],
        ["cuda"] * 2,
    ):
        assert device_channel.choose_channel(others) is None, others


def job_merge() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    src: Any = get_peft_model(
        nn.Sequential(nn.Linear(64, 96)), LoraConfig(target_modules=["0"], init_lora_weights=False)
    )
    rank = dist.get_rank()
    dst = nn.Sequential(nn.Linear(64, 96)) if rank else None
    with channel_on() as log:
        anyrank.sync(dst, None if rank else src, merge=True, verify=True)
    merged = src.merge_and_unload()
    if dst is not None:
        for name, tensor in merged.state_dict().items():
            assert torch.equal(dst.state_dict()[name], tensor)
    assert len(log.rounds) > 4


def test_merged_adapters_take_the_lane() -> None:
    run_ranks(2, job_merge)


def job_replicas() -> int:
    """Values that two ranks hold come from both, each a part."""
    mesh = DeviceMesh("cpu", [0, 1])
    whole = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    src = dst = None
    if dist.get_rank() < 2:
        src = {"w": distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None)}
    else:
        dst = {"w": torch.zeros(256, 128)}
    with channel_on():
        report = anyrank.sync(dst, src, verify=True)
    assert dst is None or torch.equal(dst["w"], whole)
    return report.bytes_sent[dist.get_rank()]


def test_replicas_share_what_is_sent() -> None:
    assert run_ranks(3, job_replicas) == [65536, 65536, 0]
