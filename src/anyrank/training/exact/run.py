"""A loader's exact=True: everything that the steps know about exact sums.

It also checks the gradients that an optimizer steps: they must be those of exact sums, unchanged.
`torch.nn.utils.clip_grad_norm_` adds up the squares of FSDP2's gradients by shard, so its factor
depends on the number of ranks, and nothing announces that. Its trace can be seen: every gradient is
multiplied by a number that is not a power of two. Parameters outside of the model, such as those
of a loss, have gradients of a rank's own microbatches only.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn

from anyrank.errors import CheckpointError
from anyrank.tensors.torch_classes import is_dtensor, is_fsdp2
from anyrank.training.data.schedule import StepPlan
from anyrank.training.exact.checks import (
    COMPILED,
    check_model,
    check_threads,
    differences,
    environment,
    is_compiled,
)
from anyrank.training.exact.optimizers import judge_optimizer
from anyrank.training.exact.rounds import Rounds
from anyrank.training.exact.sync import ExactSync
from anyrank.training.gradients.buckets import local
from anyrank.training.gradients.sync import GradientSync
from anyrank.training.steps.step_listeners import watching_optimizers
from anyrank.world.arguments import compare_arguments
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.exact")

MAX_SAMPLES = 4  # parameters: a norm scales all, but an embedding's corner may have no gradient
CORNER = 4  # elements of a sample along each dim
WARNING = (
    "exact=True: gradients that FSDP2 shards were changed before the optimizer's step. If "
    "torch.nn.utils.clip_grad_norm_ changed them, results depend on the number of ranks. Call "
    "step.clip_grad_norm_(max_norm) instead. Elementwise changes are not affected"
)


class ExactRun:
    """The conditions, besides its data, on which a run with exact=True depends.

    Attributes:
        record: the conditions: "threads" (intra-op, on each rank), "device" (its type), "cpu"
            (instruction set), "torch" and "anyrank" (versions), "wrapper" (FSDP2, or another or
            none, of the model that was trained first); empty until the first step.
        takes_turns: whether the ranks take turns in the microbatches of a step; None before the
            first step of a pass over the data.
    """

    def __init__(self) -> None:
        self.record: dict[str, Any] = {}
        self.takes_turns: bool | None = None
        self._judged: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._known: dict[int, ref[nn.Parameter]] = {}  # parameters that the loader trains, by id
        self._samples: dict[int, torch.Tensor] = {}  # gradient samples of sharded parameters, by id
        self._has_begun, self._logs = False, True  # since a resume; whether this is the first rank
        self._noted: set[str] = set()
        self._notes: list[str] = []  # the loader's, in its current pass

    @contextmanager
    def watching(self, notes: list[str]) -> Generator[None, None, None]:
        """Run a pass over the data, and check the optimizers that step in it, for the notes.

        Raises:
            ValueError: from an optimizer's step, before it changes anything: its bits depend on
                the ranks, or it has parameters of a model and others.
        """
        self.takes_turns, self._notes = None, notes
        with watching_optimizers(self):
            yield

    def see_step(self, optimizer: torch.optim.Optimizer, has_stepped: bool) -> None:
        """Check an optimizer and its gradients before a step; raise like `watching`."""
        if has_stepped:
            return
        notes = self._notes
        if optimizer not in self._judged:
            for note in judge_optimizer(optimizer):
                self._tell(note, notes)
            self._judged.add(optimizer)
        self._check_strangers(optimizer)
        self.compare((p for group in optimizer.param_groups for p in group["params"]), notes)

    def open_sync(
        self,
        model: nn.Module,
        ranks: Ranks,
        group: Any,
        plan: StepPlan,
        is_first: bool,
        notes: list[str],
    ) -> GradientSync:
        """Open the exchange of a model's gradients for one pass over a step. Collective.

        Args:
            model: wrapped or not, or a container of several.
            ranks: the data-parallel ranks.
            group: the user's group of these ranks.
            plan: the step.
            is_first: it is the model's first pass.
            notes: receives a sentence about each difference found.

        Raises:
            TypeError, ValueError, CheckpointError: as for `begin` and `ExactSync`.
        """
        if is_first:
            self.begin(model, ranks, notes)
        else:
            check_threads(self.record, ValueError)  # a library may have changed it since
        if self.takes_turns is None:
            self.takes_turns = takes_turns(model, ranks)
        rounds = Rounds(plan, ranks, self.takes_turns)
        compare = partial(self.compare, notes=notes)
        remember = self.remember_gradients
        return ExactSync(model, ranks, group, rounds, is_first, compare, remember)

    def begin(self, model: nn.Module, ranks: Ranks, notes: list[str]) -> None:
        """Check a model before its first step. Collective over the data-parallel ranks.

        Differences from the start of the run, and conditions that cannot be checked, are noted
        once.

        Raises:
            ValueError: the results of a part of the model depend on the number of ranks, or the
                number of threads is not the one that the run started with; on every rank.
            CheckpointError: the ranks differ in something that results depend on.
        """
        now = environment(model)
        if self._has_begun:
            now["wrapper"] = self.record["wrapper"]

        def check() -> None:
            check_model(model, ranks)
            check_threads(self.record, ValueError)

        compare_arguments(ranks, "exact=True: microbatches", now, CheckpointError, check)
        self._logs = ranks.index == 0
        for note in differences(self.record, now) + [COMPILED] * is_compiled(model):
            self._tell(note, notes)
        self.record, self._has_begun = now, True

    def _tell(self, note: str, notes: list[str], anywhere: bool = False) -> None:
        """Record a sentence, once; the first rank logs it, or with `anywhere` each that finds
        it."""
        if note not in self._noted:
            self._noted.add(note)
            notes.append(note)
            if self._logs or anywhere:
                log.warning("%s", note)

    def compare(self, parameters: Iterable[nn.Parameter], notes: list[str]) -> None:
        """Record, once, that parameters' gradients were changed since `remember_gradients`."""
        if WARNING not in self._noted and any(map(self._is_changed, parameters)):
            self._tell(WARNING, notes, anywhere=True)

    def remember_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Remember the gradients of a model's parameters as the optimizer should find them."""
        for parameter in parameters:
            key = id(parameter)
            if key not in self._known:
                self._known[key] = ref(parameter, lambda _, key=key: self._known.pop(key, None))
        if WARNING in self._noted:
            return
        sharded = (p for p in parameters if is_dtensor(p) and p.grad is not None)
        some = (p for p in sharded if local(p.detach()).numel())
        self._samples = {id(p): _sample_of(p) for p in itertools.islice(some, MAX_SAMPLES)}

    def _is_changed(self, parameter: nn.Parameter) -> bool:
        """Return True if a gradient has changed since remembered, by more than a power of two."""
        before = self._samples.get(id(parameter))
        if before is None or parameter.grad is None:
            return False
        return not _is_scaled_by_two(before, _sample_of(parameter))

    def _check_strangers(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer has only parameters of a model, or none of any model.

        Raises:
            ValueError: it has both; names the parameter by its position in the optimizer.
        """
        numbered = [
            (number, index, parameter)
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            if parameter.grad is not None
        ]
        strangers = [row for row in numbered if id(row[2]) not in self._known]
        if 0 < len(strangers) < len(numbered):
            number, index, parameter = strangers[0]
            raise ValueError(
                f"exact=True: parameter {index} of group {number} of the optimizer, of shape "
                f"{list(parameter.shape)}, is not part of the model that was passed to "
                "microbatches(), so its gradient is only that of this rank's microbatches. Pass "
                "one module that holds both to microbatches(), such as "
                "nn.ModuleList([model, loss])."
            )

    def check_saved(self, record: Mapping[str, Any]) -> None:
        """Raise CheckpointError for the record of a run with a different number of threads."""
        check_threads(record, CheckpointError)

    def load(self, record: Mapping[str, Any], step: int) -> list[str]:
        """Continue with the record of a state, which may be empty; return notes."""
        if not record:
            note = f"exact=True starts at step {step}; earlier steps were summed in another order"
            return [note] if step else []
        self.record, self._has_begun = dict(record), False
        return []


def takes_turns(model: nn.Module, ranks: Ranks) -> bool:
    """Return True if the ranks take turns in a step's microbatches, by a pass's first model.

    FSDP2 reduces gradients in each backward, so with turns a rank keeps only shards of sums. Other
    gradients are exchanged after the last backward, where neighboring microbatches add up most.
    """
    return ranks.size > 1 and any(is_fsdp2(module) for module in model.modules())


def _sample_of(parameter: Any) -> torch.Tensor:
    """Return a corner of this rank's part of a parameter's gradient.

    Version counters do not show changes: operations on lists of DTensors leave them as they are.
    """
    part = local(parameter.grad.detach())
    return part[tuple(slice(CORNER) for _ in part.shape)].clone()


def _is_scaled_by_two(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Return True if one power of two scaled all elements, as `GradScaler.unscale_` does."""
    if before.shape != now.shape:
        return False
    before, now = (torch.view_as_real(t) if t.is_complex() else t for t in (before, now))
    before, now = before.double(), now.double()
    normal = before.isfinite() & now.isfinite() & (before != 0) & (now != 0)
    factors = (now / before)[normal].unique()
    return not len(factors) or (len(factors) == 1 and float(factors[0].frexp()[0]) == 0.5)
