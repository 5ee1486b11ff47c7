"""The private names of torch that docs/dev/private-names.md lists exist in the installed torch.

The table says for each tested version which names it has; `make compat` runs this on each. A name
that goes is then a failed test that names it, and not an AttributeError in somebody's training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.filesystem
import torch.distributed.tensor.placement_types
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from anyrank.versions import TESTED_TORCH

PAGE = Path(__file__).parents[3] / "docs" / "dev" / "private-names.md"
Owners = dict[str, Callable[[], Any]]


@pytest.fixture(scope="module")
def wrapped() -> Iterator[dict[str, Any]]:
    """A module under FSDP2, FSDP2's group and record of it, and a module under DDP, on one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    unit: Any = fully_shard(nn.Linear(2, 2))
    state = unit._get_fsdp_state()
    group = getattr(state, "_fsdp_param_group", None)
    yield {
        "unit": unit,
        "state": state,
        "group": group,
        "record": group.fsdp_params[0],
        "ddp": DistributedDataParallel(nn.Linear(2, 2)),
        "sharded": unit.weight,
    }
    dist.destroy_process_group()


def owners(wrapped: dict[str, Any]) -> Owners:
    """What each listed name is an attribute of; the names of the same object share a line."""
    module, weight = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    sequence = torch.optim.lr_scheduler.SequentialLR(optimizer, [scheduler], [])
    found: Owners = {}

    def have(owner: Any, *names: str) -> None:
        found.update(dict.fromkeys(names, lambda: owner))

    have(dist.distributed_c10d, "_get_default_store", "_world")
    have(wrapped["unit"], "_get_fsdp_state")
    have(wrapped["state"], "_fsdp_param_groups", "_fsdp_param_group")
    have(wrapped["group"], "_reduce_scatter_comm")
    have(wrapped["ddp"].reducer, "_reset_state")
    have(wrapped["ddp"], "_comm_hooks")
    have(wrapped["sharded"], "_local_tensor", "_spec", "_op_dispatcher")
    have(wrapped["sharded"].device_mesh, "_get_root_mesh")
    have(dist.ProcessGroupGloo, "_Options")
    have(dist.ProcessGroupGloo._Options(), "_devices", "_threads")
    have(module, "_non_persistent_buffers_set", "_modules", "_parameters", "_buffers")
    have(module, "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    have(module, "_load_from_state_dict", "_save_to_state_dict", "_apply")
    have(module, "_state_dict_hooks", "_state_dict_pre_hooks")
    have(module, "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    have(weight, "_post_accumulate_grad_hooks", "_version", "_base")
    have(optimizer, "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    have(optimizer, "_optimizer_load_state_dict_pre_hooks")
    have(optimizer, "_optimizer_load_state_dict_post_hooks")
    have(scheduler, "_step_count", "_last_lr")
    have(sequence, "_schedulers", "_milestones")
    have(torch._C._nn, "_parse_to")
    have(torch._C._distributed_c10d, "_dump_fr_trace", "_resolve_process_group")
    have(nn.MultiheadAttention(2, 1), "_reset_parameters")
    have(dist.checkpoint.filesystem, "_StorageInfo")
    have(torch._utils, "_rebuild_tensor_v2", "_rebuild_tensor_v3")
    have(torch.utils, "_pytree")
    have(torch.utils.data._utils.worker, "_worker_loop")
    have(torch, "_subclasses", "_foreach_copy_")
    have(dist.ProcessGroupGloo.Options, "_timeout")
    have(nn.modules.module, "_has_any_global_hook")
    have(torch._C, "_are_functorch_transforms_active", "_clear_DTensor_sharding_propagator_cache")
    have(torch.autograd.forward_ad, "_current_level")
    have(dist, "_composable")
    have(dist.tensor.placement_types, "_StridedShard")
    return found


# Names of things that torch writes into files, or that its wrappers put into names of parameters.
IN_TEXTS = {"_metadata", "_extra_state", "_orig_mod", "_checkpoint_wrapped_module"}
IN_TEXTS |= {"_fsdp_wrapped_module", "_layout", "_coordinate_on_dim"}
IN_TEXTS |= {"_dump_nccl_trace"}  # which builds for CUDA alone have


def rows() -> list[tuple[list[str], list[str]]]:
    """The names of each row of the table of torch's, and its cells by version."""
    text = PAGE.read_text(encoding="utf-8").partition("<!-- torch -->")[2]
    lines = text.partition("<!-- end -->")[0].strip().splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(re.findall(r"`(_\w+)`", row[0]), row[-len(TESTED_TORCH) :]) for row in cells]


def lacking(names: list[str], known: Owners) -> list[str]:
    return [name for name in names if name in known and not hasattr(known[name](), name)]


def test_the_table_says_what_the_installed_torch_has(wrapped: dict[str, Any]) -> None:
    known = owners(wrapped)
    minors = [version.rsplit(".", 1)[0] for version in TESTED_TORCH]
    column = minors.index(".".join(torch.__version__.split(".")[:2]))
    said = {tuple(names): cells[column] for names, cells in rows()}
    found = {
        tuple(names): ", ".join(f"no `{name}`" for name in lacking(names, known)) or "yes"
        for names, _ in rows()
    }
    assert said == found


def test_every_listed_name_is_looked_up(wrapped: dict[str, Any]) -> None:
    listed = {name for names, _ in rows() for name in names}
    assert listed - owners(wrapped).keys() - IN_TEXTS == set()
    assert owners(wrapped).keys() - listed == set()


def test_a_lacking_name_is_found() -> None:
    assert lacking(["_version", "_nothing"], dict.fromkeys(["_version", "_nothing"], object)) == [
        "_version",
        "_nothing",
    ]
    assert lacking(["_version"], {"_version": lambda: torch.zeros(1)}) == []
