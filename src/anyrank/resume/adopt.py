"""Resuming from another tool's checkpoint: what it holds comes over, the rest is reported.

Weights go the way of `load`. Optimizers and stateful parts are described as a step of a run would
describe them, and go the way of `resume`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from anyrank.data.position import ElasticData
from anyrank.errors import CheckpointError, LoadError
from anyrank.files.manifest import Manifest
from anyrank.files.storage import storage_for
from anyrank.formats.tools.foreign import ForeignCheckpoint
from anyrank.formats.tools.read import read_foreign
from anyrank.loading.execute_load import execute_load
from anyrank.loading.plan_load import AgreedPlan, header_reader, look_at_source, plan_load
from anyrank.model.memory_meter import Meter
from anyrank.model.options import LoadOptions
from anyrank.model.verify import compare_duplicates
from anyrank.random_state.saved_streams import StreamOutcome, derive_all
from anyrank.resume import foreign_optimizer, foreign_state
from anyrank.resume.options import ResumeArguments
from anyrank.resume.restore import Resuming
from anyrank.resume.select_step import Candidate, Selected
from anyrank.saving.run_store import RunFolder
from anyrank.saving.save import rank_coords
from anyrank.state.optimizer import Names, match_optimizer
from anyrank.state.part_types import Matched, Stored, listed
from anyrank.state.report import Outcome, ResumeReport
from anyrank.state.stateful import match_stateful
from anyrank.state.train_state import TrainState, names_of
from anyrank.tensors.names import renamer
from anyrank.tensors.spec import StoredTensor
from anyrank.world.ranks import Ranks

WAYS = {  # on, where a module's tensors do not fit
    "missing": "rename=..., or fresh=[...] for those that keep their values, or skip={part!r}",
    "unexpected": "rename=..., where '' as the new name leaves a tensor out, or skip={part!r}",
}


def adopt(state: TrainState, path: str, arguments: ResumeArguments, ranks: Ranks) -> Resuming:
    """Fill a state from another tool's checkpoint at a path. All ranks.

    Raises:
        CheckpointError: it does not fit the state, which is unchanged then; or reading failed in
            the middle.
        UnsafeFile: a pickle that would run code, or a header that lies.
    """
    source = ranks.from_one("reading the checkpoint", lambda: read_foreign(path, ranks.size > 1))
    adopting = _Adopting(state, source, path, arguments, ranks)
    adopting.match()
    adopting.fill()
    return adopting


class _Adopting(Resuming):
    """Matches a state with another tool's checkpoint, and fills it."""

    def __init__(
        self,
        state: TrainState,
        source: ForeignCheckpoint,
        path: str,
        arguments: ResumeArguments,
        ranks: Ranks,
    ) -> None:
        super().__init__(state, _selected(source, path), ranks, arguments)
        self.source, self.path, self.arguments = source, path, arguments
        self.rename = renamer(arguments.rename)
        self.plans: dict[str, AgreedPlan] = {}
        self.used: set[str] = set()

    def match(self) -> None:
        """Compare every part with what the checkpoint holds. Nothing is changed.

        Raises:
            CheckpointError: all problems, in one list.
        """
        self.ranks.together("looking at the checkpoint", self._check_visible)
        wanted = {k: value for k, value in self.inner.parts.items() if k not in self.skip}
        for part, value in wanted.items():
            if isinstance(value, nn.Module):
                self._match_module(part, value)

        def here() -> None:
            targets = self.inner.targets()
            names = names_of(targets)
            for part, value in wanted.items():
                if isinstance(value, Optimizer):
                    self.matched[part] = self._optimizer(part, value, names)
                elif not isinstance(value, nn.Module):
                    self.matched[part] = self._stateful(part, value)
            wrong = [problem for match in self.matched.values() for problem in match.problems]
            wrong += self._unknown(self._held())
            if wrong:
                raise CheckpointError(self._mismatch(wrong))

        self.ranks.together("matching the checkpoint", here)
        self.matched = {part: self.matched[part] for part in wanted}

    def _check_visible(self) -> None:
        for info in self.source.listing.files:
            if not storage_for(info.path).is_file(info.path):
                raise CheckpointError(
                    f"{info.path}: is not there on this rank: put the checkpoint where all ranks "
                    "see it"
                )

    def _match_module(self, part: str, module: nn.Module) -> None:
        """Plan the load of a module, or say why nothing comes. All ranks."""
        if part not in self.source.weights:
            self.matched[part] = self._absent()
            if part == "model":
                raise CheckpointError(
                    f"{self.path} holds no model's weights; it has "
                    f"{', '.join(sorted(self.source.weights)) or 'none at all'}"
                )
            return
        self.used.add(part)
        ways = {kind: way.format(part=[part]) for kind, way in WAYS.items()}
        options = LoadOptions(
            rename=self.arguments.rename, is_fresh=self._stored({}).is_fresh, ways=ways
        )
        listing, tensors = self.source.model(part), None
        headers = header_reader(module, self.path, self.ranks, known=listing)
        tell = partial(look_at_source, self.path, self.ranks, headers)
        if self.inner.given.is_used:
            tensors = self.ranks.own("looking at the model", lambda: self.inner.tensors()[part])
        try:
            sources = self.ranks.together("looking at the source", tell)
            plan = plan_load(
                module,
                self.path,
                self.ranks,
                options,
                sources,
                headers,
                known=listing,
                tensors=tensors,
            )
            ends = plan.match.stored_twice  # a tied tensor keeps the values of one of them alone
            if ends:
                self.ranks.from_one(
                    "comparing tied tensors", lambda: compare_duplicates(plan.match.listing, ends)
                )
        except LoadError as error:
            text = self._mismatch([f"{part}: {error}"])
            raise CheckpointError(text, causes=error.causes) from error
        self.plans[part] = plan
        self.matched[part] = Matched(_outcome_of(plan))

    def _absent(self) -> Matched:
        return Matched(Outcome("fresh", f"the checkpoint of {self.source.tool} has none"))

    def _optimizer(self, part: str, optimizer: Optimizer, names: Names) -> Matched:
        source = self.source.optimizers.get(part)
        if source is None:
            return self._absent()
        self.used.add(part)
        record, tensors, problems = foreign_optimizer.record_of(
            part, optimizer, source, names, self.rename
        )
        if problems:
            return Matched(Outcome("exact"), problems=problems)
        stored = self._stored(tensors)
        matched = match_optimizer(part, optimizer, record, stored, names, self.ranks.index)
        matched.outcome = _outcome_of_fills(matched)
        commit = matched.commit

        def commit_counted() -> None:
            commit()
            foreign_optimizer.count_in_tensors(optimizer)

        matched.commit = commit_counted
        return matched

    def _stored(self, tensors: dict[str, StoredTensor]) -> Stored:
        listing = self.source.listing.with_tensors(tensors)
        return Stored(listing, 0, False, self.fresh, casts=True)

    def _stateful(self, part: str, thing: Any) -> Matched:
        if isinstance(thing, ElasticData):
            made, outcome = foreign_state.start_of(thing, self.source)
            return Matched(outcome, commit=lambda: thing.load_state_dict(made))
        if part not in self.source.states:
            return self._absent()
        self.used.add(part)
        tree, outcome = self.source.states[part], None
        problem = foreign_state.problem_of(part, thing, tree)
        if problem is not None:
            return Matched(Outcome("exact"), problems=[problem])
        if part == "scheduler":
            tree, outcome = foreign_state.in_optimizer_steps(part, thing, tree, self.source)
        record, tensors = foreign_state.record_of(part, thing, tree)
        if isinstance(record, str):
            return Matched(Outcome("fresh", record))
        matched = match_stateful(part, thing, record, self._stored(tensors), self.ranks.index)
        matched.outcome = outcome or matched.outcome
        return matched

    def _read(self) -> None:
        for part, plan in self.plans.items():
            module: Any = self.inner.parts[part]
            result = execute_load(module, plan, self.ranks, Meter(), None)
            self.bytes_read += result.measured[self.ranks.index].bytes_read
        super()._read()

    def _commit(self) -> None:
        super()._commit()
        self.state.run = None  # a run of its own, which begins here
        data = self.state.data
        if isinstance(data, ElasticData):
            self.state.samples = data.samples

    def _restore_streams(self) -> dict[str, StreamOutcome]:
        coords = rank_coords(self.state, self.ranks)
        return derive_all(
            coords,
            seed=self.inner.seed,
            samples=self.state.samples,
            generators=self.inner.generators,
            reason=f"{self.source.tool} keeps them by process",
        )

    def _notes(self, streams: Any) -> list[str]:
        source = self.source
        notes = [f"adopted from {source.tool}: the run is saved as anyrank's from here on"]
        if source.step is None:
            said = source.not_a_step or "the checkpoint does not say its step"
            notes.append(f"{said}: the run counts from 0")
        notes += [
            f"not read: {', '.join(keys[:5])} of {part}, of which the model has no use"
            for part, plan in self.plans.items()
            if (keys := plan.match.ignored)
        ]
        notes += [
            f"not read: {name}, which no part of the state is named after"
            for name in sorted(self._held() - self.used - {*self.skip})
        ]
        reasons: dict[str, list[str]] = {}
        for name, why in source.not_read.items():
            reasons.setdefault(why, []).append(name)
        notes += [f"not read: {', '.join(names[:5])}: {why}" for why, names in reasons.items()]
        return notes

    def _held(self) -> set[str]:
        """The parts that the checkpoint has, of those that can be read."""
        source = self.source
        return {*source.weights, *source.optimizers, *source.states}

    def report(self, folder: RunFolder, verify: bool) -> ResumeReport:
        """What was done. All ranks."""
        made = super().report(folder, verify)
        return replace(made, path=self.path, verified="headers and sizes")


def _selected(source: ForeignCheckpoint, path: str) -> Selected:
    """A checkpoint of another tool, as a resume sees a step of a run."""
    step, samples = source.step or 0, source.samples or 0
    manifest = Manifest(
        run="",
        step=step,
        epoch=int(source.epoch or 0),
        samples=samples,
        saved_on={"ranks": source.ranks or 0, "layout": source.tool},
        lineage=[],
        written="",
        versions={},
        files={},
        parts={},
    )
    candidate = Candidate(step, path, manifest, source.listing)
    return Selected(candidate, manifest, source.listing, step, samples, [], [], verify=False)


def _outcome_of(plan: AgreedPlan) -> Outcome:
    match = plan.match
    if match.keep and match.missing:
        return Outcome("derived", listed("kept, as the checkpoint has none", match.missing))
    pairs = [(match.tensors[index], stored) for index, stored in match.stored.items()]
    return _outcome([(held.layout, held.dtype, stored) for held, stored in pairs])


def _outcome_of_fills(matched: Matched) -> Outcome:
    return _outcome([(fill.held.layout, fill.held.dtype, fill.stored) for fill in matched.fills])


def _outcome(rows: Sequence[tuple[Any, Any, StoredTensor]]) -> Outcome:
    """Exact where bytes went as they are into whole tensors."""
    cast = sorted(
        {f"{stored.dtype} to {dtype}" for _, dtype, stored in rows if stored.dtype != dtype}
    )
    if cast:
        return Outcome("derived", f"cast from {', '.join(cast)}".replace("torch.", ""))
    if any(layout is not None or len(stored.chunks) > 1 for layout, _, stored in rows):
        return Outcome("resharded", "laid out otherwise")
    return Outcome("exact")
