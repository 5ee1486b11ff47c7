"""The checks before a run is resumed, trained or saved: equal arguments, and who may write."""

from __future__ import annotations

import operator

from anyrank.errors import CheckpointError
from anyrank.runs.resume.options import SaveOptions
from anyrank.runs.saving.collect import check_boundary
from anyrank.runs.saving.lock import RunLock
from anyrank.runs.saving.run_folder import RunFolder
from anyrank.runs.state.train_state import TrainState
from anyrank.world.arguments import compare_arguments
from anyrank.world.ranks import Ranks


def agree_on_run(
    state: TrainState, folder: RunFolder, options: SaveOptions, ranks: Ranks, has_callback: bool
) -> bool:
    """Compare the arguments of a run's objects, and look at its folder. Collective.

    Args:
        state: state of the run.
        folder: folder of the run.
        options: options of `Checkpoints`.
        ranks: ranks that open the run.
        has_callback: whether this rank has `on_commit`.

    Returns:
        True if any rank has `on_commit`.

    Raises:
        CheckpointError: arguments or data differ between ranks; the folder belongs to another
            tool; an optimizer cannot be saved.
    """
    compare_arguments(ranks, "Checkpoints", vars(options), CheckpointError)
    for loader in state.parts.loaders():
        loader.position.check_same(ranks)
    state.parts.agree(ranks)

    def check_own() -> bool:
        if ranks.index == 0:
            folder.check_no_other()
        state.parts.check_optimizers(ranks.index)  # now, and not after hours of training
        return has_callback

    what = "opening the run"
    return ranks.run_and_reduce(what, lambda: (None, check_own()), operator.or_)[1]


def become_writer(state: TrainState, folder: RunFolder, lock: RunLock, ranks: Ranks) -> None:
    """Take the run's lock on the first rank; raise CheckpointError in the middle of a step, or if
    another process writes to the folder. Any rank may call it.
    """
    check_boundary(state)
    if ranks.index == 0:
        lock.take(lambda: folder.check_run(state.run))
