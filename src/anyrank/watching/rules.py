"""The rules of `anyrank.check` that compare ranks: from common knowledge to findings.

A rule says what is wrong on which ranks, and is silent if it cannot know.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace

from anyrank.watching.facts import Facts, Known
from anyrank.watching.findings import Finding
from anyrank.watching.model_rules import some
from anyrank.wording import count
from anyrank.world.alike import RanksByText
from anyrank.world.failures import ranks_by_value
from anyrank.world.first_ranks import name_ranks

RULES = "replicas", "ties", "optimizer", "trainable", "random", "sampler", "batch", "frozen"


def run_rules(known: Known) -> list[Finding]:
    """All findings, in the order of the rules."""
    rules = (_join_findings, _replicas, _trainable, _streams, _sampler, _batch)
    findings = [finding for rule in rules for finding in rule(known)]
    return sorted(findings, key=lambda finding: RULES.index(finding.rule))


def _join_findings(known: Known) -> Iterator[Finding]:
    """Merge equal findings that ranks have made on their own."""
    groups: dict[Finding, list[int]] = {}
    for rank, facts in _ranks(known):
        for finding in facts.findings:
            groups.setdefault(finding, []).append(rank)
    for finding, ranks in groups.items():
        yield replace(finding, where=f"{finding.where}, {name_ranks(ranks)}")


def _replicas(known: Known) -> Iterator[Finding]:
    frozen = _differing(known, "values frozen")
    lines = {line: v for line, v in _differing(known, "values").items() if line not in frozen}
    if lines:
        yield Finding(
            "replicas",
            "replicas of a parameter have different values",
            _where(lines),
            "each rank would train a model of its own, and saves would hold a mixture",
            "torch.manual_seed(0)  # on all ranks, before the model is built; or load() on all",
        )
    if frozen:
        yield Finding(
            "replicas",
            "replicas of a frozen parameter have different values",
            _where(frozen),
            "each rank would train against a part of its own, and saves would hold one of them",
            "load() or seed frozen parts equally on all ranks: they are not broadcast",
        )


def _trainable(known: Known) -> Iterator[Finding]:
    lines = known.differing.get("kinds", {})
    if lines:
        first, by_text = next(iter(lines.items()))
        shown = "; ".join(f"{text or 'absent'} on {name_ranks(r)}" for text, r in by_text.items())
        yield Finding(
            "trainable",
            f"{first} is {shown}",
            _where(lines),
            "gradients are exchanged in order and by size: ranks would hang, or sum unlike ones",
            "build the same model on all ranks: no branch on the rank",
        )
    elif order := known.differing.get("order", {}):
        names = {name: by_text for by_text in order.values() for name in by_text if name}
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
        yield Finding(
            "random",
            f"the DistributedSampler's seed differs: {_show(seeds)}",
            f"loader.sampler, {name_ranks([*seeds])}",
            "each rank takes its share of another order: samples come twice, others never",
            "DistributedSampler(dataset, seed=0)  # the same on all ranks",
        )
    if known.data_parallel < 2 or any(facts.is_seeded for facts in known.facts):
        return
    streams = ranks_by_value({rank: facts.seed for rank, facts in _ranks(known)})
    groups = [ranks for ranks in streams.values() if len(ranks) > 1]
    if known.data_parallel < len(known.ranks):  # ranks of a tensor-parallel group may be equal
        groups = [ranks for ranks in groups if len(ranks) == len(known.ranks)]
    for ranks in groups:
        facts = known.facts[known.ranks.index(ranks[0])]
        if facts.dropout:
            yield Finding(
                "random",
                "torch's random numbers come from one seed on several ranks",
                f"{facts.dropout}, {name_ranks(ranks)}",
                "every rank drops alike: fewer different gradients than it seems",
                "torch.manual_seed(seed + dist.get_rank())  # after the model is built",
            )


def _sampler(known: Known) -> Iterator[Finding]:
    loaders = {rank: facts.loader for rank, facts in _ranks(known) if facts.loader is not None}
    shared = {rank: loader for rank, loader in loaders.items() if loader.share is not None}
    if len({(loader.samples, loader.subset) for loader in shared.values()}) > 1:
        yield Finding(
            "sampler",
            "the samples are sharded twice: each rank has its own part, and DistributedSampler "
            "shares it out",
            f"loader.dataset, {name_ranks([*shared])}",
            "most samples are never seen",
            "DataLoader(part, shuffle=True)  # without a sampler; or give all ranks the whole",
        )
    shares = {loader.share for loader in shared.values() if loader.share is not None}
    if len(shares) == 1 and len(shared) == known.data_parallel > 1:
        ((size, rank),) = shares
        yield Finding(
            "sampler",
            f"every rank takes the share of rank {rank} of {size}",
            f"loader.sampler, {name_ranks([*shared])}",
            "the ranks see the same samples, and the others are never seen",
            "DistributedSampler(dataset)  # takes rank and num_replicas from the process group",
        )
    repeated = max((loader.repeated for loader in shared.values()), default=0)
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
        yield Finding(
            "batch",
            f"the batch sizes differ: {_show(sizes)}",
            f"loader.batch_size, {name_ranks([*sizes])}",
            "gradients are averaged over ranks, so samples of small batches weigh more",
            "DataLoader(..., batch_size=8)  # the same on all ranks",
        )
    elif sizes and known.global_batch is not None:
        (size,) = {*sizes.values()}
        replicas = known.data_parallel
        samples = size * known.accumulation * replicas
        if samples != known.global_batch:
            wanted, rest = divmod(known.global_batch, known.accumulation * replicas)
            yield Finding(
                "batch",
                f"a step has {samples} samples ({size} x {known.accumulation} accumulated x "
                f"{replicas} ranks), and not {known.global_batch}",
                f"loader.batch_size, {name_ranks([*sizes])}",
                "the learning rate belongs to another batch",
                f"DataLoader(..., batch_size={wanted})"
                if wanted and not rest
                else f"choose a global_batch that {known.accumulation * replicas} divides",
            )


# -- words and groups -----------------------------------------------------------------------------


def _ranks(known: Known) -> Iterator[tuple[int, Facts]]:
    yield from zip(known.ranks, known.facts, strict=True)


def _show(values: Mapping[int, Hashable]) -> str:
    """Values as text: "8 on ranks 0, 1, 4 on rank 2"."""
    groups = ranks_by_value(values).items()
    return ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in groups)


def _differing(known: Known, tables: str) -> dict[str, RanksByText]:
    """Lines of the tables of a kind for which two ranks have different values."""
    differing: dict[str, RanksByText] = {}
    for name, lines in known.differing.items():
        for line, by_text in lines.items() if name.startswith(tables) else ():
            present: RanksByText = {text: r for text, r in by_text.items() if text is not None}
            if len(present) > 1:
                differing.setdefault(line, present)
    return differing


def _where(lines: Mapping[str, RanksByText]) -> str:
    """The first lines, and the ranks whose first lines are equal."""
    by_text = next(iter(lines.values()))
    return f"{some(lines)}, " + " unlike ".join(name_ranks(ranks) for ranks in by_text.values())
