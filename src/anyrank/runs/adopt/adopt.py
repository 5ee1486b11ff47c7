"""Resume from another tool's checkpoint: restore what the state can use, and report the rest.

Weights are read as in `load`. Optimizers and stateful parts are described as a step of a run would
describe them, and restored as in `resume`.
"""

from __future__ import annotations

import re
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
from anyrank.models.frozen_parts import frozen_sources
from anyrank.models.memory_meter import Meter
from anyrank.models.options import LoadOptions
from anyrank.runs.adopt import optimizer as foreign_optimizer
from anyrank.runs.adopt.averages import is_counter, set_updates, updates_of
from anyrank.runs.adopt.schedules import MORE, count_warnings, in_optimizer_steps, other_kind
from anyrank.runs.adopt.whose_weights import (
    candidates_for,
    find_average,
    is_copy_of_model,
    weights_warning,
)
from anyrank.runs.resume.options import ResumeArguments
from anyrank.runs.resume.source import ResumeSource, misfit_text
from anyrank.runs.state.optimizer import Names, match_optimizer
from anyrank.runs.state.part_types import PartMatch, PartSource, in_line
from anyrank.runs.state.resume_report import Outcome, SavedOn
from anyrank.runs.state.run_parts import RunParts, names_of
from anyrank.runs.state.stateful import class_name, match_stateful
from anyrank.runs.state.train_state import TrainState
from anyrank.sources.foreign.checkpoint import ForeignCheckpoint
from anyrank.sources.foreign.read import read_foreign
from anyrank.sources.tables.renaming import renamer
from anyrank.tensors.spec import StoredTensor
from anyrank.training.steps.loader import ElasticLoader
from anyrank.wording import count
from anyrank.world.ranks import Ranks

WAYS_OUT = {  # text after "Fix:" in an error about a module
    "missing": "pass rename=..., or fresh=[...] for those that keep their values, or skip={part!r}",
    "unexpected": "pass rename=..., where '' as the new name drops a tensor, or skip={part!r}",
}


def adopt(parts: RunParts, path: str, arguments: ResumeArguments, ranks: Ranks) -> ForeignStep:
    """Read what another tool saved at a path, and plan the load of its modules. Collective.

    Raises:
        CheckpointError: the weights do not match the state, which is unchanged; or a rank cannot
            see the checkpoint.
        UnsafeFile: a pickle would run code, or a header has impossible sizes.
    """
    names = {*parts.by_name}

    def read() -> ForeignCheckpoint:
        source = read_foreign(path, len({*ranks.nodes}) > 1)
        try:
            source = source.for_parts(names, arguments.parts or {})
            return source.for_parts(names, find_average(parts.by_name, source, arguments.skip))
        except LoadError as error:
            raise CheckpointError(f"{path}: {error}") from error

    source = _with_counts(ranks.run_on_one("reading the checkpoint", read), arguments)

    def check_visible() -> None:
        for info in source.listing.files:
            if not storage_for(info.path).is_file(info.path):
                raise CheckpointError(
                    f"{info.path}: does not exist on this rank. Put the checkpoint where every "
                    "rank can see it."
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
        no_generators=f"{source.tool} saves them by process",
        source=source,
        skip={*arguments.skip},
        chosen={*(arguments.parts or {})},
        parts=parts.by_name,
    )
    for part, value in parts.by_name.items():
        if isinstance(value, nn.Module) and part not in step.skip and step.has_weights(part):
            step.plans[part] = _plan_module(parts, part, source, path, arguments, ranks)
    return step


def _with_counts(source: ForeignCheckpoint, arguments: ResumeArguments) -> ForeignCheckpoint:
    """Set the epochs and the scheduler steps of the checkpoint to those that the caller passed."""
    epoch, often = arguments.epoch, arguments.scheduler_steps
    if often is not None:
        source = replace(source, scheduler_steps=often, says_scheduler_steps=True)
    if epoch is None:
        return source
    assumed = [text for text in source.assumed if not text.startswith("epoch ")]
    assumed.append(f"{count(epoch, 'whole epoch')}, from resume(epoch={epoch})")
    return replace(source, epoch=float(epoch), batches=0, samples=None, assumed=assumed)


def _plan_module(
    parts: RunParts,
    part: str,
    source: ForeignCheckpoint,
    path: str,
    arguments: ResumeArguments,
    ranks: Ranks,
) -> AgreedPlan:
    """Plan the load of a module. Collective.

    Raises:
        CheckpointError: the module's tensors do not match.
    """
    ways_out = {kind: text.format(part=[part]) for kind, text in WAYS_OUT.items()}
    names_fresh = PartSource(source.listing, 0, False, tuple(arguments.fresh)).is_fresh

    def is_fresh(name: str) -> bool:
        return is_counter(name) or names_fresh(name)  # the load sets a counter

    options = LoadOptions(rename=arguments.rename, is_fresh=is_fresh, ways_out=ways_out)
    module, listing = parts.by_name[part], source.model(part)
    headers = header_reader(path, partial(frozen_sources, module), ranks, known=listing)
    tell = partial(look_at_source, path, ranks, headers)
    try:
        what = "looking at the source"
        _, info = ranks.run_and_reduce(what, lambda: (None, tell()), SourceInfo.join)
        plan = plan_load(module, path, ranks, options, info, headers, known=listing)
        if plan.match.stored_twice:
            compare_ties(plan.match, plan.reading.reading_ranks, ranks)
    except LoadError as error:
        text = misfit_text(path, parts.unusable, [f"{part}: {error}"])
        raise CheckpointError(text, causes=error.causes) from error
    return plan


@dataclass(kw_only=True)
class ForeignStep(ResumeSource):
    """Another tool's checkpoint in the form of a run's step, for a resume.

    Attributes:
        source: the checkpoint, by its headers.
        skip: names of parts that are not restored.
        chosen: names of parts whose source the user chose with parts=.
        parts: the parts of the state.
        plans: plans of the modules that are loaded, by part.
        used: names of the checkpoint's parts that are restored.
        trained: modules whose parameters have optimizer state that is restored.
    """

    source: ForeignCheckpoint
    skip: set[str]
    chosen: set[str]
    parts: Mapping[str, Any]
    plans: dict[str, AgreedPlan] = field(default_factory=dict[str, AgreedPlan])
    used: set[str] = field(default_factory=set[str])
    trained: set[str] = field(default_factory=set[str])

    def has_weights(self, part: str) -> bool:
        """Return True if the checkpoint has the weights of a module.

        Raises:
            CheckpointError: it lacks those of the model itself.
        """
        if part not in self.source.weights and part == "model":
            tables = self.source.tables()
            raise CheckpointError(
                f"{self.path}: cannot tell which table holds the model's weights. Found: "
                f"{', '.join(tables) or 'none'}. Select the one that the optimizer has trained: "
                f"parts={{'model': {next(iter(tables), 'net')!r}}}"
            )
        return part in self.source.weights

    def match(
        self, state: TrainState, arguments: ResumeArguments, ranks: Ranks
    ) -> dict[str, PartMatch]:
        parts = state.parts
        names, matched = names_of(parts.targets()), dict[str, PartMatch]()
        for part, value in parts.by_name.items():
            if part in self.skip:
                continue
            if isinstance(value, nn.Module):
                matched[part] = self._module(part, ranks)
            elif isinstance(value, Optimizer):
                matched[part] = self._optimizer(part, value, names, arguments, ranks)
            elif isinstance(value, ElasticLoader):
                matched[part] = self._position(value, state)
            else:
                matched[part] = self._stateful(part, value, ranks)
        return matched

    def _module(self, part: str, ranks: Ranks) -> PartMatch:
        plan = self.plans.get(part)
        if plan is None:
            return self._absent(part)
        self.used.add(part)

        match = plan.match
        missing = {name for name in match.missing if is_counter(name)} if match.stored else set()
        counters = [target for target in match.tensors if target.name in missing]
        updates = updates_of(counters, self.step) if counters else 0

        def load() -> int:
            result = fill_from_files(plan, ranks, Meter(), None)
            set_updates(counters, updates)
            return result.moved[ranks.index].read

        return PartMatch(
            _outcome_of(plan, [target.name for target in counters], updates), load=load
        )

    def _absent(self, part: str) -> PartMatch:
        """Match a part whose name the checkpoint does not have; return what could be meant."""
        source, parts = self.source, self.parts
        thing = parts[part]
        if part in self.chosen:
            problem = f"{part}: what parts= names for it is not a state of a {class_name(thing)}"
            return PartMatch(Outcome("exact"), problems=[problem])
        if part in source.not_read:
            return PartMatch(Outcome("fresh", source.not_read[part]))
        named_here = {*parts, *self.skip}
        names = [
            source.keys.get(name, name)
            for name in candidates_for(thing, source)
            if name not in named_here
        ]
        reason = f"the checkpoint of {source.tool} does not have it"
        if names:
            words = [name for name in names if part.lower() in re.split(r"[._-]", name.lower())]
            likely = names if len(names) == 1 else words
            reads = f"{likely[0]!r}}} reads that" if len(likely) == 1 else "...} reads one of them"
            reason = (
                f"nothing in the checkpoint of {source.tool} has this name; it has "
                f"{', '.join(names[:5])}. parts={{{part!r}: {reads}"
            )
        if isinstance(thing, nn.Module) and is_copy_of_model(part, parts):
            reason += (
                f"; it has the script's initial values. {part}.load_state_dict(model.state_dict()) "
                "starts an average with the model's values"
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
        if matched.outcome != "derived":  # else it has new parameters, or lacks some
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
            warnings = [] if outcome else count_warnings(part, tree, self.source)
        record, tensors = _record_of(part, thing, tree)
        if isinstance(record, str):
            return PartMatch(Outcome("fresh", record))
        matched = match_stateful(part, thing, record, self._part_source(tensors), ranks.index)
        matched.outcome = outcome or matched.outcome
        matched.warnings += warnings
        return matched

    def warnings(self) -> list[str]:
        doubts = [
            weights_warning(part, self.source, self.path, self.used, part in self.chosen)
            for part in sorted(self.plans.keys() & self.trained)
        ]
        return [*self._step_warnings(), *filter(None, doubts)]

    def _step_warnings(self) -> list[str]:
        step, stepped = self.source.step, self.source.optimizer_steps
        has_state = any(part.state for part in self.source.optimizers.values())
        if has_state and (step is None or (step == 0 and stepped is None)):
            return [
                f"{self._without_step()}, although its optimizer has stepped. Set state.step after "
                "the resume."
            ]
        if step is None or stepped is None or max(step, stepped) <= MORE * min(step, stepped) + 1:
            return []
        return [
            f"the checkpoint says step {step}, but its optimizer has stepped "
            f"{count(stepped, 'time')}. The run continues from step {step}; if that number does "
            "not count optimizer steps, set state.step after the resume."
        ]

    def _without_step(self) -> str:
        says = "says step 0" if self.source.step == 0 else "does not say its step"
        reason = self.source.not_a_step or f"the checkpoint {says}"
        return f"{reason}, so the run counts from 0"

    def notes(self) -> list[str]:
        source = self.source
        notes = [f"started from a checkpoint of {source.tool}; new steps are saved by anyrank"]
        if source.step is None and not self._step_warnings():
            notes.append(self._without_step())
        notes += source.assumed
        pairs = [f"{part} from {key}" for part, key in source.keys.items() if part in self.used]
        notes += [f"read under other names: {', '.join(pairs)}"] if pairs else []
        notes += [
            f"ignored: {', '.join(keys[:5])} of {part}, which the model does not need"
            for part, plan in self.plans.items()
            if (keys := plan.match.ignored)
        ]
        notes += [
            f"ignored: {name}, because no part of the state has that name"
            for name in sorted(self.names - self.used - self.skip)
        ]
        reasons: dict[str, list[str]] = {}
        for name, why in source.not_read.items():
            reasons.setdefault(why, []).append(name)
        notes += [f"ignored: {', '.join(names[:5])}: {why}" for why, names in reasons.items()]
        return notes


def _outcome_of(plan: AgreedPlan, counters: Sequence[str], updates: int) -> Outcome:
    """Return a module's outcome, with the value that its counters of updates are set to."""
    match, reasons = plan.match, list[str]()
    kept = [name for name in match.missing if name not in counters]
    if kept and match.keep:
        reasons.append(in_line("kept, because the checkpoint does not have them", kept))
    if counters:
        reasons.append(
            f"{', '.join(counters)} is set to {updates}, because the checkpoint does not store it; "
            "with 0 the next update would overwrite the average"
        )
    if reasons:
        return Outcome("derived", "; ".join(reasons))
    pairs = [(match.tensors[index], stored) for index, stored in match.stored.items()]
    return _outcome([(tensor.layout, tensor.dtype, stored) for tensor, stored in pairs])


def _outcome(rows: Sequence[tuple[Any, Any, StoredTensor]]) -> Outcome:
    """Return "exact" if bytes went unchanged into unsharded tensors; otherwise the reason."""
    cast = sorted(
        {f"{stored.dtype} to {dtype}" for _, dtype, stored in rows if stored.dtype != dtype}
    )
    if cast:
        return Outcome("derived", f"cast from {', '.join(cast)}".replace("torch.", ""))
    if any(layout is not None or len(stored.chunks) > 1 for layout, _, stored in rows):
        return Outcome("resharded", "the layout changed")
    return Outcome("exact")


def _record_of(
    part: str, thing: Any, tree: Any
) -> tuple[dict[str, Any] | str, dict[str, StoredTensor]]:
    """Return the record of a stateful part and its tensors, or the reason why it has none."""
    tensors: dict[str, StoredTensor] = {}

    def put(where: str, value: Any) -> Any:
        tensors[where] = value.renamed(where)
        return {"~whole": where}

    try:
        tree = to_json(tree, part, put)
    except CheckpointError as error:
        return f"the checkpoint's value cannot be read: {str(error).partition(': a ')[2]}", {}
    record = {"kind": "stateful", "class": class_name(thing), "layout": "", "tree": tree}
    return record, tensors


def _start_of(data: ElasticLoader, source: ForeignCheckpoint) -> tuple[dict[str, Any], Outcome]:
    """Return the state of a loader that continues at the start of the checkpoint's epoch.

    Which samples of that epoch were seen is unknown, because the other tool has its own order.
    """
    now = data.state_dict()
    epoch = 0.0 if source.epoch is None else source.epoch
    samples = round(epoch * now["n"]) if source.samples is None else source.samples
    state = now | {"epoch": int(epoch), "step": source.step or 0, "samples": samples}
    if source.epoch is None:
        why = "the checkpoint does not say how far the data was; epoch 0 starts at its first sample"
        return state, Outcome("fresh", why)
    known, seen = _seen_twice(data, source, epoch), "Its samples will be seen twice."
    if known is not None:
        seen = f"About {count(known, 'sample')} will be seen twice."
    begins = f"epoch {int(epoch)} restarts from its first sample: the checkpoint was saved"
    if source.batches:
        return state, Outcome(
            "fresh",
            f"{begins} {count(source.batches, 'batch', 'batches')} into it, but the other tool's "
            f"sample order is unknown. {seen}",
        )
    if epoch != int(epoch):
        part = f"{epoch - int(epoch):.0%}"
        return state, Outcome(
            "fresh",
            f"{begins} {part} into it, but the other tool's sample order is unknown. {seen}",
        )
    why = f"{count(int(epoch), 'whole epoch')}; the next one starts"
    if known:
        why += (
            f". By this loader's {len(data)} steps per epoch, step {source.step} is in the middle "
            f"of an epoch, but the other tool's sample order is unknown. {seen}"
        )
    return state, Outcome("derived", why)


def _seen_twice(data: ElasticLoader, source: ForeignCheckpoint, epoch: float) -> int | None:
    """Estimate how many samples of the epoch that restarts were seen; None if unknown.

    If the checkpoint counts no samples, its steps are assumed to have the size of the loader's.
    """
    now = data.state_dict()
    if "deal" in now:  # a stream, whose rows have not been counted
        return None
    if epoch != int(epoch):
        return round((epoch - int(epoch)) * now["n"])
    if source.samples is not None:
        return max(0, source.samples - int(epoch) * now["n"])
    steps = (source.step or 0) - int(epoch) * len(data)
    return steps * now["global_batch"] if 0 < steps < len(data) else None
