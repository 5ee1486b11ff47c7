"""How often the ranks of a load and of a save meet; one rank's last error is every rank's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks.sharded_nets import Net
from tests.ranks.spies import meetings
from torch import nn
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.loading import headers
from anyrank.models.share import ModelShare
from anyrank.testing import run_ranks
from anyrank.world.connections import Connections
from anyrank.world.message import HEAD_BYTES
from anyrank.world.ranks import Ranks, open_ranks

SIZES = {"width": 7, "hidden": 9}
LOAD = [
    "load()",
    "planning the load",
    "opening the files",
    "reading the weights",
    "putting the weights in place",
]


def met_in(call: Callable[[], object]) -> list[str]:
    """What the ranks meet for in a call."""
    with meetings() as met:
        call()
    return met


def count(path: str) -> list[list[str]]:
    plain, sharded = Net(**SIZES), Net(**SIZES)
    fully_shard(sharded)
    with anyrank.meta():
        on_meta = Net(**SIZES)
    found = [met_in(lambda model=model: anyrank.load(model, path)) for model in (plain, on_meta)]
    found.append(met_in(lambda: anyrank.load(sharded, path)))
    frozen = nn.ModuleDict({"net": anyrank.freeze(plain, source=path)})
    whole = {f"net.{name}": value for name, value in torch.load(path).items()}
    found.append(met_in(lambda: anyrank.load(frozen, whole)))
    return found


def test_a_load_meets_five_times(tmp_path: Path) -> None:
    path = str(tmp_path / "net.pt")
    torch.save(Net(**SIZES).state_dict(), path)
    for plain, on_meta, sharded, frozen in run_ranks(2, count, path, timeout=60):
        assert plain == on_meta == sharded == frozen == LOAD


SAVE = [
    "collecting the state",
    "comparing the replicas",
    "making the folder",
    "writing the checkpoint",
    "committing the checkpoint",
]


def count_of_saves(folder: str) -> list[list[str]]:
    """A first save, a second one on DDP or FSDP2, and one of a step that is saved already."""
    found: list[list[str]] = []
    for name in ("plain", "sharded"):
        model = Net(**SIZES)
        if name == "sharded":
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        state = anyrank.TrainState(model, optimizer)
        with anyrank.Checkpoints(f"{folder}/{name}", state) as ckpts:
            ckpts.resume()
            found.append(met_in(ckpts.save))
            state.step += 1
            found.append(met_in(ckpts.save))
            found.append(met_in(lambda: ckpts.save(unless_saved=True)))
    return found


def test_a_save_meets_five_times(tmp_path: Path) -> None:
    saved = ["preparing a save"]
    for met in run_ranks(2, count_of_saves, str(tmp_path), timeout=60):
        assert met == [SAVE, SAVE, saved, SAVE, SAVE, saved]


def count_of_steps(folder: str) -> list[list[str]]:
    model = Net(**SIZES)
    loader = anyrank.ElasticLoader(torch.arange(8.0)[:, None], global_batch=4, microbatch=2)
    state = anyrank.TrainState(model, torch.optim.AdamW(model.parameters()), data=loader)
    found: list[list[str]] = []
    with anyrank.Checkpoints(folder, state) as ckpts:
        for step in loader:
            for _ in step.microbatches(model):
                pass
            found.append(met_in(ckpts.step_done))
            found.append(met_in(ckpts.save))
    return found


def test_a_step_meets_once_and_its_save_counts_the_samples_too(tmp_path: Path) -> None:
    for first, save, second, _ in run_ranks(2, count_of_steps, str(tmp_path / "run"), timeout=60):
        assert save == ["comparing the samples", *SAVE]
        assert second == ["completing the step"]
        assert "looking at the optimizers" in first  # once, when they have their state


def fails_last(path: str) -> str:
    rank = torch.distributed.get_rank()
    model = Net(**SIZES)

    def move_buffers(_: ModelShare) -> None:
        if rank == 1:
            raise torch.cuda.OutOfMemoryError("no memory left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelShare, "move_buffers", move_buffers)
        try:
            anyrank.load(model, path)
        except anyrank.RankError as error:
            return str(error)
    return ""


def test_an_error_in_the_last_step_of_one_rank_is_every_rank_s(tmp_path: Path) -> None:
    path = str(tmp_path / "net.pt")
    torch.save(Net(**SIZES).state_dict(), path)
    for text in run_ranks(2, fails_last, path, timeout=60):
        assert "[rank 1] OutOfMemoryError: no memory left" in text
        assert "The model has its new values, except on the rank that failed" in text


def sees_late(path: str) -> list[str]:
    """Only the second rank sees the source, so that it reads the headers for both."""
    source = path if torch.distributed.get_rank() else None
    model = Net(**SIZES)
    met = met_in(lambda: anyrank.load(model, source, strategy="scatter"))
    want = torch.load(path)
    assert all(torch.equal(held, want[name]) for name, held in model.state_dict().items())
    return met[:2]


def test_another_rank_reads_the_headers_if_the_first_one_sees_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "net.pt")
    torch.save(Net(**SIZES).state_dict(), path)
    for met in run_ranks(2, sees_late, path, timeout=60):
        assert met == ["load()", "reading the headers"]


def long_headers(path: str) -> tuple[list[str], int]:
    """Headers that are too long for the first message; and how often this rank read them."""
    read: list[object] = []
    usual = headers.list_headers

    def spied(source: Any) -> Any:
        read.append(source)
        return usual(source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headers, "SMALL_BYTES", 100)
        patch.setattr(headers, "list_headers", spied)
        met = met_in(lambda: anyrank.load(Net(**SIZES), path))
    return met[:3], len(read)


def test_long_headers_are_read_once_and_broadcast(tmp_path: Path) -> None:
    path = str(tmp_path / "net.pt")
    torch.save(Net(**SIZES).state_dict(), path)
    (met, read), (other, no_reads) = run_ranks(2, long_headers, path, timeout=60)
    assert met == other == ["load()", "reading the headers", "planning the load"]
    assert (read, no_reads) == (1, 0)


# -- what is sent ---------------------------------------------------------------------------------

SAY: dict[str, Callable[[Ranks, bytes], object]] = {
    "run": lambda ranks, value: ranks.run("saying", lambda: value),
    "reduce": lambda ranks, value: ranks.reduce("saying", value, max),
    "collect": lambda ranks, value: ranks.collect("saying", value),
    "gather": lambda ranks, value: ranks.gather("saying", value),
}


def lengths_sent(primitive: str, length: int) -> list[int]:
    """Lengths of the messages that this rank sends as all say so many bytes."""
    sent: list[int] = []
    usual = Connections.send

    def spied(self: Connections, data: bytes, index: int) -> Any:
        sent.append(len(data))
        return usual(self, data, index)

    with open_ranks(call="test()") as ranks, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connections, "send", spied)
        SAY[primitive](ranks, os.urandom(length))
    return sent


@pytest.mark.parametrize(
    ("primitive", "length", "root", "leaf"),
    [
        ("run", 5000, [], []),
        ("reduce", 20, [], []),
        ("reduce", 5000, [5000] * 3, [5000]),
        ("collect", 5000, [], [5000]),
        ("gather", 5000, [20_000] * 3, [5000]),
    ],
)
def test_ranks_send_a_short_message_up_and_one_down_and_what_is_too_long_for_it(
    primitive: str, length: int, root: list[int], leaf: list[int]
) -> None:
    first, *others = run_ranks(4, lengths_sent, primitive, length, timeout=60)
    assert first.count(HEAD_BYTES) == 3
    long = [nbytes for nbytes in first if nbytes != HEAD_BYTES]
    assert long == pytest.approx(root, rel=0.02)
    for sent in others:
        assert sent[0] == HEAD_BYTES
        assert sent[1:] == pytest.approx(leaf, rel=0.02)
