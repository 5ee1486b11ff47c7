"""The rules of `anyrank.check`: each a function from what the ranks know together to findings.

A rule says what is wrong on which ranks, and is silent where it cannot know.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

from anyrank.watching.facts import Facts, Known, Values
from anyrank.watching.findings import Finding
from anyrank.watching.model_facts import some
from anyrank.wording import count
from anyrank.world.group import name_ranks

V = TypeVar("V", bound=Hashable)

TIES = {
    "declared": "is declared as tied to",
    "memory": "shares its memory with, and is another Parameter than,",
    "values": "has the same values as, and is another Parameter than,",
    "units": "is in another FSDP2 unit than, and no longer tied to,",
}


def run_rules(known: Known) -> list[Finding]:
    """All findings, in the order of the rules."""
    return [finding for rule in RULES.values() for finding in rule(known)]


def _replicas(known: Known) -> Iterator[Finding]:
    lines = _differing(known, "values")
    if lines:
        yield Finding(
            "replicas",
            "replicas of a parameter have different values",
            _where(lines),
            "each rank would train a model of its own, and saves would hold a mixture",
            "torch.manual_seed(0)  # on all ranks, before the model is built; or load() on all",
        )


def _ties(known: Known) -> Iterator[Finding]:
    for (one, other, how), ranks in _by_value(known, lambda facts: facts.ties):
        at = "units" if how == "units" else "other"
        fix = {
            "units": "fully_shard([embedding, head])  # one unit; or leave both to the root's",
            "other": f"model.{other} = model.{one}  # or model.tie_weights()",
        }
        yield Finding(
            "ties",
            f"{other} {TIES[how]} {one}",
            f"{one}, {other}, {name_ranks(ranks)}",
            "each gets gradients of its own and they drift apart"
            if how != "memory"
            else "the optimizer updates the same memory twice in each step",
            fix[at],
        )


def _optimizer(known: Known) -> Iterator[Finding]:
    for (missing, stale), ranks in _by_one(known, lambda facts: (facts.missing, facts.stale)):
        if not missing:
            continue
        what = f"the optimizer misses {count(missing.total, 'trainable parameter')}"
        if stale:
            what += f", and holds {stale.total} of their shapes that the model no longer has"
        yield Finding(
            "optimizer",
            what,
            f"{missing}, {name_ranks(ranks)}",
            "they get gradients and are never updated",
            "optimizer = AdamW(model.parameters())  # after the model is moved, adapted, sharded"
            if stale
            else "give them to the optimizer, or requires_grad_(False)",
        )


def _trainable(known: Known) -> Iterator[Finding]:
    lines = known.differing.get("kinds", {})
    if lines:
        first, values = next(iter(lines.items()))
        told = [
            f"{value or 'absent'} on {name_ranks(ranks)}"
            for value, ranks in _by_text(values).items()
        ]
        yield Finding(
            "trainable",
            f"{first} is {'; '.join(told)}",
            _where(lines),
            "gradients are exchanged in order and by size: ranks would hang, or sum unlike ones",
            "build the model alike on all ranks: no branch on the rank",
        )
    elif order := known.differing.get("order", {}):
        names = {value: order[at] for at in order for value in order[at].values() if value}
        yield Finding(
            "trainable",
            "parameters are registered in different orders",
            _where(names),
            "DDP and optimizers go by the order: gradients of one would be summed into another",
            "for name in sorted(names): ...  # build modules in one order; a set has none",
        )


def _streams(known: Known) -> Iterator[Finding]:
    seeds = {
        rank: facts.loader.seed
        for rank, facts in _ranks(known)
        if facts.loader is not None and facts.loader.seed is not None
    }
    if len({*seeds.values()}) > 1:
        told = ", ".join(
            f"{seed} on {name_ranks(ranks)}" for seed, ranks in _by_text(seeds).items()
        )
        yield Finding(
            "streams",
            f"the DistributedSampler's seed differs: {told}",
            f"loader.sampler, {name_ranks([*seeds])}",
            "each rank takes its share of another order: samples come twice, others never",
            "DistributedSampler(dataset, seed=0)  # the same on all ranks",
        )
    if known.data_parallel < 2 or any(facts.streams_given for facts in known.facts):
        return
    groups = [ranks for _, ranks in _by_one(known, lambda facts: facts.stream) if len(ranks) > 1]
    if known.data_parallel < len(known.ranks):  # ranks of a tensor-parallel group may be alike
        groups = [ranks for ranks in groups if len(ranks) == len(known.ranks)]
    for ranks in groups:
        facts = known.facts[known.ranks.index(ranks[0])]
        if facts.loader is None and not facts.dropout:
            continue
        augments = "" if facts.loader is None else facts.loader.augments
        users = str(facts.dropout) or (f"loader.dataset's {augments}" if augments else "")
        if users:
            yield Finding(
                "streams",
                "torch's random numbers are the same on several ranks",
                f"{users}, {name_ranks(ranks)}",
                "every rank drops and augments alike: fewer different samples than it seems",
                "torch.manual_seed(seed + dist.get_rank())  # after the model is built",
            )


def _sampler(known: Known) -> Iterator[Finding]:
    loaders = {rank: facts.loader for rank, facts in _ranks(known) if facts.loader is not None}
    shared = {rank: one for rank, one in loaders.items() if one.layers}
    twice = {rank: one for rank, one in shared.items() if len(one.layers) > 1}
    parts = {(one.samples, one.subset) for one in shared.values()}
    if twice:
        layers = " and ".join(layer.kind for layer in next(iter(twice.values())).layers)
        yield Finding(
            "sampler",
            f"the samples are sharded twice, by {layers}",
            f"loader, {name_ranks([*twice])}",
            "most samples are never seen",
            "leave one of them out",
        )
    elif len(parts) > 1:
        kind = next(iter(shared.values())).layers[0].kind
        yield Finding(
            "sampler",
            f"the samples are sharded twice: each rank has its own part, and {kind} shares it out",
            f"loader.dataset, {name_ranks([*shared])}",
            "most samples are never seen",
            "DataLoader(part, shuffle=True)  # without a sampler; or give all ranks the whole",
        )
    same = {one.layers[0] for one in shared.values()}
    if len(same) == 1 and len(shared) == known.data_parallel > 1:
        (layer,) = same
        yield Finding(
            "sampler",
            f"every rank takes the share of rank {layer.rank} of {layer.ranks}",
            f"loader.sampler, {name_ranks([*shared])}",
            "the ranks see the same samples, and the others are never seen",
            "DistributedSampler(dataset)  # takes rank and num_replicas from the process group",
        )
    repeated = max((one.repeated for one in shared.values()), default=0)
    if repeated:
        samples = next(iter(shared.values())).samples
        yield Finding(
            "sampler",
            f"{count(repeated, 'sample')} of {samples} are repeated, so that ranks have as many",
            f"loader.sampler, {name_ranks([*shared])}",
            "they count twice in an epoch, and in the mean of an evaluation",
            "DistributedSampler(dataset, drop_last=True)  # or ElasticLoader: each exactly once",
        )


def _batch(known: Known) -> Iterator[Finding]:
    sizes = {
        rank: facts.loader.batch
        for rank, facts in _ranks(known)
        if facts.loader is not None and facts.loader.batch is not None
    }
    if len({*sizes.values()}) > 1:
        told = ", ".join(
            f"{size} on {name_ranks(ranks)}" for size, ranks in _by_text(sizes).items()
        )
        yield Finding(
            "batch",
            f"the batch sizes differ: {told}",
            f"loader.batch_size, {name_ranks([*sizes])}",
            "gradients are averaged over ranks, so samples of small batches weigh more",
            "DataLoader(..., batch_size=8)  # the same on all ranks",
        )
    elif sizes and known.global_batch is not None:
        (size,) = {*sizes.values()}
        replicas = known.data_parallel
        found = size * known.accumulation * replicas
        if found != known.global_batch:
            wanted, rest = divmod(known.global_batch, known.accumulation * replicas)
            yield Finding(
                "batch",
                f"a step has {found} samples ({size} x {known.accumulation} accumulated x "
                f"{replicas} ranks), and not {known.global_batch}",
                f"loader.batch_size, {name_ranks([*sizes])}",
                "the learning rate belongs to another batch",
                f"DataLoader(..., batch_size={wanted})"
                if wanted and not rest
                else f"choose a global_batch that {known.accumulation * replicas} divides",
            )


def _device(known: Known) -> Iterator[Finding]:
    for meta, ranks in _by_one(known, lambda facts: facts.meta):
        if meta:
            yield Finding(
                "device",
                f"{count(meta.total, 'tensor')} on meta, without values",
                f"{meta}, {name_ranks(ranks)}",
                "the forward fails, or computes nothing",
                "anyrank.load(model, path)  # or anyrank.materialize(model)",
            )
    for (off, device), ranks in _by_one(known, lambda facts: (facts.off, facts.device)):
        if off:
            yield Finding(
                "device",
                f"{count(off.total, 'tensor')} off the rank's device, {device}",
                f"{off}, {name_ranks(ranks)}",
                "ranks share a device, or the forward stops at tensors of two",
                f'torch.accelerator.set_device_index(local_rank); model.to("{device}")',
            )


def _frozen(known: Known) -> Iterator[Finding]:
    for training, ranks in _by_one(known, lambda facts: facts.training):
        if training:
            yield Finding(
                "frozen",
                "a frozen part is in train mode",
                f"{training}, {name_ranks(ranks)}",
                "its dropout draws and its norms move, though it is not trained",
                f"anyrank.freeze(model.{training.names[0]})  # stays in eval through train()",
            )
    for sent, ranks in _by_one(known, lambda facts: facts.broadcast):
        if sent:
            yield Finding(
                "frozen",
                "DDP broadcasts the buffers of a frozen part in each forward",
                f"{sent}, {name_ranks(ranks)}",
                "traffic for values that never change",
                f"anyrank.freeze(model.{sent.names[0]})  # before DDP",
            )


def _reentrant(known: Known) -> Iterator[Finding]:
    for (parts, is_ddp, is_static), ranks in _by_one(
        known, lambda facts: (facts.reentrant, facts.ddp, facts.static_graph)
    ):
        if parts and is_ddp and not is_static:
            yield Finding(
                "reentrant",
                "reentrant checkpointing under DDP",
                f"{parts}, {name_ranks(ranks)}",
                "its inner backward makes DDP see parameters ready twice, or skip unused ones",
                "checkpoint(..., use_reentrant=False)  # or anyrank.recompute_",
            )


RULES: Mapping[str, Callable[[Known], Iterator[Finding]]] = {
    "replicas": _replicas,
    "ties": _ties,
    "optimizer": _optimizer,
    "trainable": _trainable,
    "streams": _streams,
    "sampler": _sampler,
    "batch": _batch,
    "device": _device,
    "frozen": _frozen,
    "reentrant": _reentrant,
}


# -- words and groups -----------------------------------------------------------------------------


def _ranks(known: Known) -> Iterator[tuple[int, Facts]]:
    yield from zip(known.ranks, known.facts, strict=True)


def _by_one(known: Known, of: Callable[[Facts], V]) -> list[tuple[V, list[int]]]:
    """The ranks that have each value."""
    groups: dict[V, list[int]] = {}
    for rank, facts in _ranks(known):
        groups.setdefault(of(facts), []).append(rank)
    return list(groups.items())


def _by_value(known: Known, of: Callable[[Facts], Sequence[V]]) -> list[tuple[V, list[int]]]:
    """As `_by_one`, where a rank has several."""
    groups: dict[V, list[int]] = {}
    for rank, facts in _ranks(known):
        for value in of(facts):
            groups.setdefault(value, []).append(rank)
    return list(groups.items())


def _by_text(values: Mapping[int, V]) -> dict[V, list[int]]:
    groups: dict[V, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return groups


def _differing(known: Known, tables: str) -> dict[str, Values]:
    """Lines of the tables of a kind for which two ranks have different values."""
    found: dict[str, Values] = {}
    for name, lines in known.differing.items():
        for line, values in lines.items() if name.startswith(tables) else ():
            here: Values = {rank: value for rank, value in values.items() if value is not None}
            if len({*here.values()}) > 1:
                found.setdefault(line, here)
    return found


def _where(lines: Mapping[str, Values]) -> str:
    """The first lines, and the ranks that are alike on the first."""
    groups = _by_text(next(iter(lines.values())))
    return f"{some(lines)}, " + " unlike ".join(name_ranks(ranks) for ranks in groups.values())
