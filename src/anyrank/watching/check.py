"""`anyrank.check`: find mistakes in a setup on several ranks before the first step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from anyrank.checks import check_int, check_model
from anyrank.errors import RankError
from anyrank.watching.facts import LINES, Facts, Known, Tables, facts_of
from anyrank.watching.findings import Finding, Findings
from anyrank.watching.rules import run_rules
from anyrank.world.alike import Compared, differing, digests_of_lines, join_digests
from anyrank.world.arguments import compare_arguments
from anyrank.world.ranks import open_ranks


def check(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    loader: Any = None,
    *,
    global_batch: int | None = None,
    accumulation: int = 1,
) -> Findings:
    """Look for common mistakes in the setup of a training, before its first step.

    Collective: every rank must call it. Changes nothing, reads no sample, and runs no forward. It
    takes about as long as reading the parameters once. In a single process, the rules that compare
    ranks find nothing. The rules are `replicas`, `ties`, `optimizer`, `trainable`, `random`,
    `sampler`, `batch` and `frozen`; docs/check.md says what each of them finds.

    Example::

        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model[0].parameters())
        (finding,) = anyrank.check(model, optimizer)
        assert (finding.rule, finding.where) == ("optimizer", "1.weight, 1.bias, rank 0")

    Args:
        model: the model as it is trained: wrapped, sharded, adapted.
        optimizer: the optimizer of its parameters, or a list of several. If omitted, its rule is
            skipped.
        loader: the loader of the training data. If omitted, the rules about data are skipped.
        global_batch: number of samples that a step should have, on all ranks together.
        accumulation: number of batches that each rank accumulates per step.

    Returns:
        The findings, the same on every rank; an empty list if nothing is wrong.

    Raises:
        LoadError: the model is wrapped by FSDP1, or torch.ao has packed a part of it.
        RankError: arguments differ between ranks, or a rank did not call.
        TypeError, ValueError: an argument is wrong.
    """
    return check_now(model, optimizer, loader, global_batch=global_batch, accumulation=accumulation)


def check_now(
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    *,
    global_batch: int | None = None,
    accumulation: int = 1,
    written: Collection[int] | None = None,
    is_seeded: bool = False,
) -> Findings:
    """Do what `check` does, before or after forwards have run. Collective.

    Args:
        model, optimizer, loader, global_batch, accumulation: as for `check`.
        written: ids of the frozen parameters that forwards have changed; None if no forward has
            run. After a forward, buffers are not compared.
        is_seeded: whether forwards ran with their own seeds.
    """
    listed = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    optimizers = [value for value in listed if value is not None]

    def check_arguments() -> None:
        check_model(model)
        for value in optimizers:
            if not hasattr(value, "param_groups"):
                raise TypeError(
                    f"optimizer=: expected a torch optimizer, got {type(value).__name__}"
                )
        if global_batch is not None:
            check_int("global_batch", global_batch, 1)
        check_int("accumulation", accumulation, 1)

    with open_ranks(call="check()", may_be_alone=True) as ranks:
        arguments = {"global_batch": global_batch, "accumulation": accumulation}
        compare_arguments(ranks, "check", arguments, RankError, check_arguments)

        def find_facts() -> tuple[tuple[Tables, Facts], dict[str, Compared]]:
            tables, facts = facts_of(model, optimizers, loader, ranks, written, is_seeded)
            return (tables, facts), digests_of_lines(tables, ranks.rank)

        (tables, own_facts), compared = ranks.run_and_reduce(
            "looking at the model", find_facts, join_digests
        )
        wrong = differing(tables, compared, ranks, LINES)
        facts = ranks.collect("sharing facts about the model", own_facts)

        def judge() -> list[Finding]:
            assert facts is not None
            return run_rules(Known(ranks.ranks, facts, wrong, global_batch, accumulation))

        return Findings(ranks.run_on_one("applying the rules", judge), ranks.size)
