"""Resume from another tool's checkpoint: take over what it holds, and report the rest.

Weights are read as in `load`. Optimizers and stateful parts are described as a step of a run would
describe them, and restored as in `resume`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anyrank.errors import CheckpointError, LoadError
from anyrank.files.json_codec import to_json
from anyrank.files.storage import storage_for
from anyrank.loading.agreed_plan import AgreedPlan, plan_load
from anyrank.loading.headers import SourceInfo, header_reader, look_at_source
from anyrank.loading.load import fill_from_files
from anyrank.loading.verify import compare_ties
from anyrank.models.memory_meter import Meter
from anyrank.models.options import LoadOptions
from anyrank.runs.adopt import optimizer as foreign_optimizer
from anyrank.runs.adopt.averages import is_counter, set_updates, updates_of
from anyrank.runs.adopt.schedules import MORE, doubts_on_count, in_optimizer_steps, other_kind
from anyrank.runs.adopt.whose_weights import (
    average_of,
    candidates_for,
    doubt_on_weights,
    is_copy_of_model,
)
from anyrank.runs.resume.options import ResumeArguments
from anyrank.runs.resume.source import ResumeSource, misfit_text
from anyrank.runs.state.optimizer import Names, match_optimizer
from anyrank.runs.state.part_types import PartMatch, PartSource, in_line
from anyrank.runs.state.resume_report import Outcome, SavedOn
from anyrank.runs.state.run_parts import names_of
from anyrank.runs.state.stateful import class_name, match_stateful
from anyrank.runs.state.train_state import TrainState
from anyrank.sources.foreign.checkpoint import ForeignCheckpoint
from anyrank.sources.foreign.read import read_foreign
from anyrank.sources.tables.renaming import renamer
from anyrank.tensors.spec import StoredTensor
from anyrank.training.steps.loader import ElasticLoader
from anyrank.wording import count
from anyrank.world.ranks import Ranks

WAYS_OUT = {  # text after "to go on" in an error about a module
    "missing": "rename=..., or fresh=[...] for those that keep their values, or skip={part!r}",
    "unexpected": "rename=..., where '' as the new name leaves a tensor out, or skip={part!r}",
}


def adopt(state: TrainState, path: str, arguments: ResumeArguments, ranks: Ranks) -> ForeignStep:
    """Read what another tool saved at a path, and plan the load of its modules. All ranks.

    Raises:
        CheckpointError: weights do not fit the state, which is unchanged; or a rank does not see
            the checkpoint.
        UnsafeFile: a pickle would run code, or a header lies.
    """
    names = {*state.parts.parts}

    def read() -> ForeignCheckpoint:
        source = read_foreign(path, len({*ranks.nodes}) > 1)
        try:
            source = source.for_parts(names, arguments.parts or {})
            return source.for_parts(names, average_of(state, source, arguments.skip))
        except LoadError as error:
            raise CheckpointError(f"{path}: {error}") from error

    source = _with_counts(ranks.run_on_one("reading the checkpoint", read), arguments)

    def check_visible() -> None:
        for info in source.listing.files:
            if not storage_for(info.path).is_file(info.path):
                raise CheckpointError(
                    f"{info.path}: is not there on this rank: put the checkpoint where all ranks "
                    "see it"
                )

    ranks.run("looking at the checkpoint", check_visible)
    step = ForeignStep(
        path=path,
        listing=source.listing,
        names={*source.weights, *source.optimizers, *source.states},
        step=source.step or 0,
        epoch=int(source.epoch or 0),
        samples=source.samples or 0,
        saved_on=SavedOn(source.ranks or 0, source.tool),
        no_generators=f"{source.tool} keeps them by process",
        source=source,
        skip={*arguments.skip},
        chosen={*(arguments.parts or {})},
        parts=state.parts.parts,
    )
    for part, value in state.parts.parts.items():
        if isinstance(value, nn.Module) and part not in step.skip and step.has_weights(part):
            step.plans[part] = _plan_module(state, part, source, path, arguments, ranks)
    return step


def _with_counts(source: ForeignCheckpoint, arguments: ResumeArguments) -> ForeignCheckpoint:
    """Set the epochs, and the steps of the schedules, of the checkpoint as the caller says."""
    epoch, often = arguments.epoch, arguments.scheduler_steps
    if often is not None:
        source = replace(source, scheduler_steps=often, says_scheduler_steps=True)
    if epoch is None:
        return source
    assumed = [text for text in source.assumed if not text.startswith("epoch ")]
    assumed.append(f"{count(epoch, 'whole epoch')}, as resume(epoch={epoch}) says")
    return replace(source, epoch=float(epoch), batches=0, samples=None, assumed=assumed)


def _plan_module(
    state: TrainState,
    part: str,
    source: ForeignCheckpoint,
    path: str,
    arguments: ResumeArguments,
    ranks: Ranks,
) -> AgreedPlan:
    """Plan the load of a module. All ranks.

    Raises:
        CheckpointError: the module's tensors do not fit.
    """
    inner = state.parts
    ways_out = {kind: text.format(part=[part]) for kind, text in WAYS_OUT.items()}
    names_fresh = PartSource(source.listing, 0, False, tuple(arguments.fresh)).is_fresh

    def is_fresh(name: str) -> bool:
        return is_counter(name) or names_fresh(name)  # the load sets a counter

    options = LoadOptions(rename=arguments.rename, is_fresh=is_fresh, ways_out=ways_out)
    module, listing = inner.parts[part], source.model(part)
    headers = header_reader(module, path, ranks, known=listing)
    tell = partial(look_at_source, path, ranks, headers)
    try:
        what = "looking at the source"
        _, info = ranks.run_and_reduce(what, lambda: (None, tell()), SourceInfo.join)
        plan = plan_load(module, path, ranks, options, info, headers, known=listing)
        if plan.match.stored_twice:
            compare_ties(plan.match, plan.reading.reading_ranks, ranks)
    except LoadError as error:
        text = misfit_text(path, inner.unusable, [f"{part}: {error}"])
        raise CheckpointError(text, causes=error.causes) from error
    return plan


@dataclass(kw_only=True)
class ForeignStep(ResumeSource):
    """Another tool's checkpoint in the form of a run's step, as a resume needs it.

    Attributes:
        source: the checkpoint, by its headers.
        skip: names of parts that stay as they are.
        chosen: names of parts for which the user says what is read into them.
        parts: the parts of the state.
        plans: plans of the modules that are loaded, by part.
        used: names of its parts that are taken over.
        trained: modules with optimizer state of their parameters that is taken over.
    """

    source: ForeignCheckpoint
    skip: set[str]
    chosen: set[str]
    parts: Mapping[str, Any]
    plans: dict[str, AgreedPlan] = field(default_factory=dict[str, AgreedPlan])
    used: set[str] = field(default_factory=set[str])
    trained: set[str] = field(default_factory=set[str])

    def has_weights(self, part: str) -> bool:
        """Return whether it has the weights of a module.

        Raises:
            CheckpointError: it lacks those of the model itself.
        """
        if part not in self.source.weights and part == "model":
            tables = self.source.tables()
            raise CheckpointError(
                f"{self.path}: nothing says which weights are the model's; it has those of "
                f"{', '.join(tables) or 'none'}: name the one that the optimizer has trained, as "
                f"parts={{'model': {next(iter(tables), 'net')!r}}}"
            )
        return part in self.source.weights

    def match(
        self, state: TrainState, arguments: ResumeArguments, ranks: Ranks
    ) -> dict[str, PartMatch]:
        inner = state.parts
        names, matched = names_of(inner.targets()), dict[str, PartMatch]()
        for part, value in inner.parts.items():
            if part in self.skip:
                continue
            if isinstance(value, nn.Module):
                matched[part] = self._module(part, value, ranks)
            elif isinstance(value, Optimizer):
                matched[part] = self._optimizer(part, value, names, arguments, ranks)
            elif isinstance(value, ElasticLoader):
                matched[part] = self._position(value, state)
            else:
                matched[part] = self._stateful(part, value, ranks)
        return matched

    def _module(self, part: str, module: nn.Module, ranks: Ranks) -> PartMatch:
        plan = self.plans.get(part)
        if plan is None:
            return self._absent(part)
        self.used.add(part)

        match = plan.match
        counters = [name for name in match.missing if is_counter(name) and match.stored]
        updates = updates_of(module, counters, self.step) if counters else 0

        def load() -> int:
            result = fill_from_files(module, plan, ranks, Meter(), None)
            if counters:
                set_updates(module, counters, updates)
            return result.moved[ranks.index].read

        return PartMatch(_outcome_of(plan, counters, updates), load=load)

    def _absent(self, part: str) -> PartMatch:
        """Match a part that the checkpoint has not under its name: say what could be it."""
        source, parts = self.source, self.parts
        thing = parts[part]
        if part in self.chosen:
            problem = f"{part}: what parts= names for it is no state of a {class_name(thing)}"
            return PartMatch(Outcome("exact"), problems=[problem])
        if part in source.not_read:
            return PartMatch(Outcome("fresh", source.not_read[part]))
        named_here = {*parts, *self.skip}
        names = [
            source.keys.get(name, name)
            for name in candidates_for(thing, source)
            if name not in named_here
        ]
        reason = f"the checkpoint of {source.tool} has none"
        if names:
            reason = (
                f"nothing in the checkpoint of {source.tool} is named after it; it has "
                f"{', '.join(names[:5])}: parts={{{part!r}: {names[0]!r}}} reads that"
            )
        if isinstance(thing, nn.Module) and is_copy_of_model(part, parts):
            reason += (
                f"; it has the script's initial values: {part}.load_state_dict(model.state_dict()) "
                "begins an average with the model's"
            )
        return PartMatch(Outcome("fresh", reason))

    def _optimizer(
        self,
        part: str,
        optimizer: Optimizer,
        names: Names,
        arguments: ResumeArguments,
        ranks: Ranks,
    ) -> PartMatch:
        source = self.source.optimizers.get(part)
        if source is None:
            return self._absent(part)
        self.used.add(part)
        record, tensors, problems = foreign_optimizer.record_of(
            part, optimizer, source, names, renamer(arguments.rename)
        )
        if problems:
            return PartMatch(Outcome("exact"), problems=problems)
        part_source = self._part_source(tensors, arguments)
        matched = match_optimizer(part, optimizer, record, part_source, names, ranks.index)
        if matched.outcome != "derived":  # else it has new parameters, or leaves some
            matched.outcome = _outcome(
                [(fill.target.layout, fill.target.dtype, fill.stored) for fill in matched.fills]
            )
        for entry in record["state"]:
            module, _, inner = entry.partition("/")
            self.trained.add(module if inner else "model")
        commit = matched.commit

        def commit_counted() -> None:
            commit()  # and counts that are plain numbers, of old versions, become tensors
            optimizer.__setstate__(
                {"state": optimizer.state, "param_groups": optimizer.param_groups}
            )

        matched.commit = commit_counted
        return matched

    def _part_source(
        self, tensors: dict[str, StoredTensor], arguments: ResumeArguments | None = None
    ) -> PartSource:
        listing = self.listing.with_tensors(tensors)
        if arguments is None:
            return PartSource(listing, 0, False, casts=True)
        fresh, drop = tuple(arguments.fresh), tuple(arguments.drop)
        joins = arguments.settings == "script"
        return PartSource(listing, 0, False, fresh, drop, casts=True, joins=joins)

    def _position(self, data: ElasticLoader, state: TrainState) -> PartMatch:
        position, outcome = _start_of(data, self.source)

        def commit() -> None:
            data.load_state_dict(position)
            state.samples = data.samples

        return PartMatch(outcome, commit=commit)

    def _stateful(self, part: str, thing: Any, ranks: Ranks) -> PartMatch:
        if part not in self.source.states:
            return self._absent(part)
        self.used.add(part)
        tree, outcome = self.source.states[part], None
        problem = other_kind(part, thing, tree)
        if problem is not None:
            return PartMatch(Outcome("exact"), problems=[problem])
        warnings: list[str] = []
        if part.startswith("scheduler") or isinstance(thing, LRScheduler):
            tree, outcome = in_optimizer_steps(part, thing, tree, self.source)
            warnings = [] if outcome else doubts_on_count(part, tree, self.source)
        record, tensors = _record_of(part, thing, tree)
        if isinstance(record, str):
            return PartMatch(Outcome("fresh", record))
        matched = match_stateful(part, thing, record, self._part_source(tensors), ranks.index)
        matched.outcome = outcome or matched.outcome
        matched.warnings += warnings
        return matched

    def warnings(self) -> list[str]:
        doubts = [
            doubt_on_weights(part, self.source, self.path, self.used, part in self.chosen)
            for part in sorted(self.plans.keys() & self.trained)
        ]
        return [*self._doubts_on_step(), *filter(None, doubts)]

    def _doubts_on_step(self) -> list[str]:
        step, stepped = self.source.step, self.source.optimizer_steps
        has_state = any(part.state for part in self.source.optimizers.values())
        if has_state and (step is None or (step == 0 and stepped is None)):
            return [
                f"{self._without_step()}, though its optimizer has stepped; set state.step after "
                "the resume"
            ]
        if step is None or stepped is None or max(step, stepped) <= MORE * min(step, stepped) + 1:
            return []
        return [
            f"the checkpoint says step {step}, and its optimizer has stepped "
            f"{count(stepped, 'time')}: the run counts from {step}; set state.step after the "
            "resume if that counts other things"
        ]

    def _without_step(self) -> str:
        says = "says step 0" if self.source.step == 0 else "does not say its step"
        reason = self.source.not_a_step or f"the checkpoint {says}"
        return f"{reason}: the run counts from 0"

    def notes(self) -> list[str]:
        source = self.source
        notes = [f"adopted from {source.tool}: the run is saved as anyrank's from here on"]
        if source.step is None and not self._doubts_on_step():
            notes.append(self._without_step())
        notes += source.assumed
        pairs = [f"{part} from {key}" for part, key in source.keys.items() if part in self.used]
        notes += [f"read by other names: {', '.join(pairs)}"] if pairs else []
        notes += [
            f"not read: {', '.join(keys[:5])} of {part}, of which the model has no use"
            for part, plan in self.plans.items()
            if (keys := plan.match.ignored)
        ]
        notes += [
            f"not read: {name}, which no part of the state is named after"
            for name in sorted(self.names - self.used - self.skip)
        ]
        reasons: dict[str, list[str]] = {}
        for name, why in source.not_read.items():
            reasons.setdefault(why, []).append(name)
        notes += [f"not read: {', '.join(names[:5])}: {why}" for why, names in reasons.items()]
        return notes


def _outcome_of(plan: AgreedPlan, counters: Sequence[str], updates: int) -> Outcome:
    """Return a module's outcome, with the number that its counters of updates are set to."""
    match, reasons = plan.match, list[str]()
    kept = [name for name in match.missing if name not in counters]
    if kept and match.keep:
        reasons.append(in_line("kept, as the checkpoint has none", kept))
    if counters:
        reasons.append(
            f"{', '.join(counters)} is {updates}, as the checkpoint has none: at 0 the next update "
            "would replace the average by the weights"
        )
    if reasons:
        return Outcome("derived", "; ".join(reasons))
    pairs = [(match.tensors[index], stored) for index, stored in match.stored.items()]
    return _outcome([(tensor.layout, tensor.dtype, stored) for tensor, stored in pairs])


def _outcome(rows: Sequence[tuple[Any, Any, StoredTensor]]) -> Outcome:
    """Return exact if bytes went unchanged into whole tensors; otherwise the reason."""
    cast = sorted(
        {f"{stored.dtype} to {dtype}" for _, dtype, stored in rows if stored.dtype != dtype}
    )
    if cast:
        return Outcome("derived", f"cast from {', '.join(cast)}".replace("torch.", ""))
    if any(layout is not None or len(stored.chunks) > 1 for layout, _, stored in rows):
        return Outcome("resharded", "laid out otherwise")
    return Outcome("exact")


def _record_of(
    part: str, thing: Any, tree: Any
) -> tuple[dict[str, Any] | str, dict[str, StoredTensor]]:
    """Return the record of a stateful part and the tensors it refers to, or why there is none."""
    tensors: dict[str, StoredTensor] = {}

    def put(where: str, value: Any) -> Any:
        tensors[where] = value.renamed(where)
        return {"~whole": where}

    try:
        tree = to_json(tree, part, put)
    except CheckpointError as error:
        return f"the checkpoint's value is not read: {str(error).partition(': a ')[2]}", {}
    record = {"kind": "stateful", "class": class_name(thing), "layout": "", "tree": tree}
    return record, tensors


def _start_of(data: ElasticLoader, source: ForeignCheckpoint) -> tuple[dict[str, Any], Outcome]:
    """Return the state of a loader that continues at the start of the checkpoint's epoch.

    Which samples of that epoch were seen is unknown, because the other tool has an order of its
    own.
    """
    now = data.state_dict()
    epoch = 0.0 if source.epoch is None else source.epoch
    samples = round(epoch * now["n"]) if source.samples is None else source.samples
    state = now | {"epoch": int(epoch), "step": source.step or 0, "samples": samples}
    if source.epoch is None:
        why = "the checkpoint does not say how far the data was: epoch 0 begins at its first sample"
        return state, Outcome("fresh", why)
    known, seen = _seen_twice(data, source, epoch), "their samples are seen twice"
    if known is not None:
        seen = f"about {count(known, 'sample')} are seen twice"
    begins = f"epoch {int(epoch)} begins again: the checkpoint was"
    if source.batches:
        return state, Outcome(
            "fresh", f"{begins} {source.batches} batches into it, in an order of its tool's: {seen}"
        )
    if epoch != int(epoch):
        part = f"{epoch - int(epoch):.0%}"
        return state, Outcome(
            "fresh", f"{begins} {part} into it, in an order of its tool's: {seen}"
        )
    why = f"{count(int(epoch), 'whole epoch')}: the next one begins"
    if known:
        why += (
            f"; at step {source.step}, that is in mid epoch by this loader's {len(data)} steps, in "
            f"an order of the tool's: {seen}"
        )
    return state, Outcome("derived", why)


def _seen_twice(data: ElasticLoader, source: ForeignCheckpoint, epoch: float) -> int | None:
    """Estimate how many samples of the epoch that begins again were seen; None if unknown.

    If the checkpoint counts no samples, its steps count, as if they were as large as the loader's.
    """
    now = data.state_dict()
    if "deal" in now:  # a stream, with rows that nobody has counted
        return None
    if epoch != int(epoch):
        return round((epoch - int(epoch)) * now["n"])
    if source.samples is not None:
        return max(0, source.samples - int(epoch) * now["n"])
    steps = (source.step or 0) - int(epoch) * len(data)
    return steps * now["global_batch"] if 0 < steps < len(data) else None
