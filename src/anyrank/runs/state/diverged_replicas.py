"""Replicas that have diverged: what may have happened, and the comparison of all between saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyrank.errors import CheckpointError
from anyrank.models.alike import Inventory, check_alike, inventory_of
from anyrank.runs.state.part_types import SHOWN, PartState, shared_tensors
from anyrank.runs.state.replicas import differing_tensors
from anyrank.runs.state.train_state import TrainState
from anyrank.tensors.sharded_tensor import shared
from anyrank.wording import first_few
from anyrank.world.alike import Values
from anyrank.world.failures import ranks_by_value
from anyrank.world.ranks import Ranks


def check_replicas(state: TrainState, ranks: Ranks) -> None:
    """Compare the whole of the model and the optimizers, and save nothing. All ranks.

    Raises:
        CheckpointError: a tensor differs that must not; names it, the ranks and the step.
    """

    def list_own() -> tuple[dict[str, PartState], Inventory]:
        parts = state.parts.save_tensors(ranks.index)
        return parts, inventory_of(shared_tensors(parts), ranks)

    parts, inventories = ranks.run_and_gather("looking at the replicas", list_own)
    tensors = shared_tensors(parts)
    title = f"step {state.step}: the ranks' states differ"
    coordinates = check_alike(title, tensors, inventories, ranks, CheckpointError)
    may_differ = {name for saved in parts.values() for name in saved.may_differ}
    replicas = [*shared(tensors, coordinates)]
    differing = differing_tensors([r for r in replicas if r[0].name not in may_differ], None, ranks)
    if differing:  # the same on all ranks, so all of them gather once more
        others = differing_tensors([r for r in replicas if r[0].name in may_differ], None, ranks)
        raise CheckpointError(describe(f"step {state.step}:", differing, parts, sorted(others)))


def describe(
    head: str,
    wrong: Mapping[str, Values],
    parts: Mapping[str, PartState],
    others: Sequence[str],
) -> str:
    """What differs, and what has happened: replicas have diverged, or an optimizer is sharded.

    Args:
        head: what was not done for it, or at which step.
        wrong: name of each tensor that must not differ -> its digest on each rank.
        parts: of the state.
        others: names of tensors that differ too, and may.
    """
    texts = [
        f"{name}: " + " unlike ".join(f"ranks {alike}" for alike in ranks_by_value(values).values())
        for name, values in wrong.items()
    ]
    optimizers = [
        part
        for part, saved in parts.items()
        if saved.record["kind"] == "optimizer"
        and wrong.keys() & {tensor.name for tensor in saved.tensors}
    ]
    of_optimizers = {tensor.name for part in optimizers for tensor in parts[part].tensors}
    each_its_own = all(len({*values.values()}) == len(values) for values in wrong.values())
    if each_its_own and wrong.keys() <= of_optimizers:
        reason = (
            f"the weights agree, so {optimizers[0]} is sharded: each rank keeps the state of its "
            "own share in plain tensors. Hold them as DTensors, which say what each rank has, or "
            "give the optimizer a state_dict() and load_state_dict() of its own; if it is not "
            "sharded, its ranks have diverged: resume the last step"
        )
    else:
        reason = (
            "the replicas have diverged (a forward around the wrapper; parameters that are "
            "unfrozen behind DDP's back, or of a module that microbatches() did not get, as a "
            "loss: give it nn.ModuleList([model, loss]); an update on one rank alone, or from a "
            "rank's own values: a buffer, its data, its random numbers): make them alike, or "
            "resume the last step; hold parts of a whole as DTensors (DTensor.from_local)"
        )
        if others:
            names = ", ".join(others[:SHOWN])
            reason += f"\nthese differ too, which they may, unless an update reads them: {names}"
    lines = [
        f"{head} ranks hold different values of what they should hold alike:",
        *(f"  {line}" for line in first_few(texts, SHOWN)),
        reason,
    ]
    return "\n".join(lines)
