"""The rules of `anyrank.check` that compare ranks.

A rule yields what is wrong on which ranks, and nothing if it cannot tell.
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
    """Apply all rules, and return the findings in the order of RULES."""
    rules = (_join_findings, _replicas, _trainable, _streams, _sampler, _batch)
    findings = [finding for rule in rules for finding in rule(known)]
    return sorted(findings, key=lambda finding: RULES.index(finding.rule))


def _join_findings(known: Known) -> Iterator[Finding]:
    """Merge equal findings that ranks made separately."""
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
            "the ranks would train different models, and a checkpoint would mix them",
            "torch.manual_seed(0)  # on every rank, before the model is built; or call load()",
        )
    if frozen:
        yield Finding(
            "replicas",
            "replicas of a frozen parameter have different values",
            _where(frozen),
            "the ranks would train with different frozen parts, and a checkpoint would hold one",
            "load() frozen parts on every rank, or seed them equally: they are not broadcast",
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
            "ranks would hang, or add up gradients of different parameters",
            "build the same model on every rank: do not branch on the rank",
        )
    elif order := known.differing.get("order", {}):
        names = {name: by_text for by_text in order.values() for name in by_text if name}
        yield Finding(
            "trainable",
            "parameters are registered in different orders",
            _where(names),
            "DDP and optimizers rely on the order: they would mix up gradients of parameters",
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
            "ranks shuffle differently: some samples are seen twice, and others never",
            "DistributedSampler(dataset, seed=0)  # the same seed on every rank",
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
                "torch's random numbers have the same seed on several ranks",
                f"{facts.dropout}, {name_ranks(ranks)}",
                "these ranks apply the same dropout mask, so gradients are less diverse",
                "torch.manual_seed(seed + dist.get_rank())  # after the model is built",
            )


def _sampler(known: Known) -> Iterator[Finding]:
    loaders = {rank: facts.loader for rank, facts in _ranks(known) if facts.loader is not None}
    shared = {rank: loader for rank, loader in loaders.items() if loader.share is not None}
    if len({(loader.samples, loader.subset) for loader in shared.values()}) > 1:
        yield Finding(
            "sampler",
            "the samples are divided twice: each rank has its own part, and DistributedSampler "
            "divides that again",
            f"loader.dataset, {name_ranks([*shared])}",
            "most samples are never seen",
            "DataLoader(part, shuffle=True)  # without a sampler; or pass the full dataset",
        )
    shares = {loader.share for loader in shared.values() if loader.share is not None}
    if len(shares) == 1 and len(shared) == known.data_parallel > 1:
        ((size, rank),) = shares
        yield Finding(
            "sampler",
            f"every rank takes the share of rank {rank} of {size}",
            f"loader.sampler, {name_ranks([*shared])}",
            "all ranks see the same samples, and the other samples are never seen",
            "DistributedSampler(dataset)  # takes rank and num_replicas from the process group",
        )
    repeated = max((loader.repeated for loader in shared.values()), default=0)
    if repeated:
        samples = next(iter(shared.values())).samples
        yield Finding(
            "sampler",
            f"DistributedSampler repeats {count(repeated, 'sample')} of {samples}",
            f"loader.sampler, {name_ranks([*shared])}",
            "they count twice in an epoch and in the mean of an evaluation",
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
            "gradients are averaged over ranks, so samples in small batches have more weight",
            "DataLoader(..., batch_size=8)  # the same on every rank",
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
                f"{replicas} ranks), not global_batch={known.global_batch}",
                f"loader.batch_size, {name_ranks([*sizes])}",
                "the learning rate was chosen for a different batch size",
                f"DataLoader(..., batch_size={wanted})"
                if wanted and not rest
                else f"choose a global_batch that is a multiple of {known.accumulation * replicas}",
            )


# -- words and groups -----------------------------------------------------------------------------


def _ranks(known: Known) -> Iterator[tuple[int, Facts]]:
    yield from zip(known.ranks, known.facts, strict=True)


def _show(values: Mapping[int, Hashable]) -> str:
    """Return the values as text: "8 on ranks 0, 1, 4 on rank 2"."""
    groups = ranks_by_value(values).items()
    return ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in groups)


def _differing(known: Known, tables: str) -> dict[str, RanksByText]:
    """Return the lines, in tables of a kind, for which two ranks have different values."""
    differing: dict[str, RanksByText] = {}
    for name, lines in known.differing.items():
        for line, by_text in lines.items() if name.startswith(tables) else ():
            present: RanksByText = {text: r for text, r in by_text.items() if text is not None}
            if len(present) > 1:
                differing.setdefault(line, present)
    return differing


def _where(lines: Mapping[str, RanksByText]) -> str:
    """Return the first names, and the groups of ranks that differ in the first one."""
    first, *others = next(iter(lines.values())).values()
    verb = "differs" if first.count == 1 else "differ"
    return f"{some(lines)}; {name_ranks(first)} {verb} from {', '.join(map(name_ranks, others))}"
