"""The objects of a run by name: how a save takes and a resume fills each of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from anyrank.checks import check_int, check_names, check_type
from anyrank.errors import CheckpointError
from anyrank.models.tensors import ModelTensor, in_state_dict
from anyrank.runs.state.accelerate_wrappers import unwrapped
from anyrank.runs.state.base import Base, base_problems
from anyrank.runs.state.like_parameters import LikeParameters
from anyrank.runs.state.modules import match_module, save_module, targets_of
from anyrank.runs.state.optimizer import match_optimizer, save_optimizer
from anyrank.runs.state.optimizer_groups import check_schedulers
from anyrank.runs.state.part_types import PartMatch, PartSource, PartState
from anyrank.runs.state.resume_report import Outcome
from anyrank.runs.state.script_settings import ScriptSettings
from anyrank.runs.state.stateful import Stateful, match_stateful, save_stateful
from anyrank.training.random_state.saved import capture, digests_of_generators
from anyrank.training.steps.loader import ElasticLoader
from anyrank.wording import count
from anyrank.world.arguments import compare_arguments
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.state")

RESERVED = ("random", "run", "step", "epoch", "samples")


class RunParts:
    """The objects of a run by name, and their saves and resumes.

    Attributes:
        by_name: name -> module, optimizer or stateful object, without Accelerate's wrappers.
        seed: seed of the run.
        generators: generators of the run, by name.
        first_rank: names of the parts whose state on the first rank is saved for all.
        base: the model's frozen base, which is not written; None to write all of the model.
        settings: settings of the parts, as the script made them.
        warned: optimizers for which the log already says that attributes are not saved, or that
            tensors are saved by rank.
        identical: optimizer -> its unsharded state that is identical on every rank.
        unusable: why the values belong to no step, or None.
        saves: number of saves of the state in this process whose replicas were compared.
        samples_before: samples of the run that none of its ElasticLoaders counts, because they came
            from data that it no longer has.
        generators_before: random generator -> digest of its state when this was made.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        seed: int,
        generators: Mapping[str, torch.Generator],
        first_rank: Sequence[str],
        base: Any,
    ) -> None:
        self.by_name = {name: unwrapped(name, part) for name, part in parts.items()}
        for name, part in self.by_name.items():
            if name in RESERVED or not name.isidentifier():
                raise ValueError(f"{name!r} cannot be the name of a part. Choose another name.")
            if not isinstance(part, (nn.Module, Optimizer, Stateful)):
                hint = "; anyrank.ElasticLoader has both" if name == "data" else ""
                raise TypeError(
                    f"{name}=: expected a module, an optimizer, or an object with state_dict() and "
                    f"load_state_dict(), got {type(part).__name__}{hint}"
                )
        check_names("first_rank", first_rank)
        for name in first_rank:
            part = self.by_name.get(name)
            if part is None or isinstance(part, (nn.Module, Optimizer)):
                raise ValueError(
                    f"first_rank contains {name!r}, which is not a stateful part. The parts are "
                    f"{', '.join(self.by_name)}; modules and optimizers are the same on every rank."
                )
        self.first_rank = frozenset(first_rank)
        self.base = None if base is None else Base(base)
        if base is not None and not isinstance(self.by_name.get("model"), nn.Module):
            raise ValueError(
                "base= is the source of a model's frozen parameters. Pass model=, too."
            )
        self.seed = check_int("seed", seed)
        check_type("generators", generators, Mapping, "a dict of names to torch.Generators")
        for name, generator in generators.items():
            check_type("generators", name, str, "a dict of names to torch.Generators")
            check_type(f"generators[{name!r}]", generator, torch.Generator, "a torch.Generator")
        self.generators = dict(generators)
        self.settings = ScriptSettings(self.by_name)
        self.warned: set[str] = set()
        self.identical: dict[str, list[str]] = {}
        self.unusable: str | None = None
        self.saves = self.samples_before = 0
        self.generators_before = self.digests_of_generators()

    def digests_of_generators(self) -> dict[str, str]:
        """Map each random generator to a digest of its state on this rank now."""
        return digests_of_generators(capture(self.generators))

    def loaders(self) -> list[ElasticLoader]:
        """Return the ElasticLoaders: `data`, and others."""
        return [part for part in self.by_name.values() if isinstance(part, ElasticLoader)]

    def num_samples(self) -> int | None:
        """Return the samples of the run's completed steps; None without an ElasticLoader."""
        if loaders := self.loaders():
            return self.samples_before + sum(loader.samples for loader in loaders)
        return None

    def optimizers(self) -> list[Optimizer]:
        """List the parts that are optimizers."""
        return [part for part in self.by_name.values() if isinstance(part, Optimizer)]

    def check_usable(self) -> None:
        """Check that a state's values belong to a step.

        Raises:
            CheckpointError: a resume failed midway, or an uncounted step has changed the state.
        """
        if self.unusable is not None:
            raise CheckpointError(f"{self.unusable}. Resume again, or rebuild the objects.")

    def targets(self) -> dict[str, list[ModelTensor]]:
        """List the tensors of each module that a run writes, by part."""
        modules = [name for name, part in self.by_name.items() if isinstance(part, nn.Module)]
        targets = {part: self._targets_of(part) for part in modules}
        if self.base is not None:
            targets["model"] = self.base.without(targets["model"], self._trained())
        return targets

    def _targets_of(self, part: str) -> list[ModelTensor]:
        """List all tensors of a module of the state."""
        return targets_of(part, self.by_name[part], has_base=self.base is not None)

    def _trained(self) -> set[int]:
        """The ids of the parameters that the optimizers hold."""
        groups = [group for optimizer in self.optimizers() for group in optimizer.param_groups]
        return {id(parameter) for group in groups for parameter in group["params"]}

    def agree(self, ranks: Ranks) -> None:
        """Compare the arguments before the first save or resume, and measure the model's base.
        Collective.

        Raises:
            CheckpointError: the state's own arguments differ between ranks; the base is on meta, or
                differs between ranks.
        """
        arguments = {
            "seed": self.seed,
            "generators": sorted(self.generators),
            "first_rank": sorted(self.first_rank),
        }
        compare_arguments(ranks, "TrainState", arguments, CheckpointError)
        if self.base is not None:
            self.base.measure(self._targets_of("model"), self._trained(), ranks)

    def check_optimizers(self, rank: int) -> None:
        """Check that the optimizers can be saved now; warn about state that would be lost.

        Raises:
            CheckpointError: an optimizer cannot be saved; the error names the part and the state.
        """
        names = names_of(self.targets())
        for part, value in self.by_name.items():
            if isinstance(value, Optimizer):
                saved = save_optimizer(part, value, names, rank)
                self._warn_of_unsaved(part, saved.unsaved, rank)

    def save(self, rank: int) -> dict[str, PartState]:
        """Return the contribution of every part to a save, as this rank sees it."""
        tensors, saved = self.save_tensors(rank), dict[str, PartState]()
        for part, value in self.by_name.items():
            if part in tensors:
                saved[part] = tensors[part]
                continue
            saved[part] = save_stateful(part, cast("Stateful", value), rank)
            if part in self.first_rank:
                saved[part].agreement = "first"
        if self.base is not None:
            targets = self._targets_of("model")
            saved["model"].record["base"] = self.base.record(targets, self._trained())
        return saved

    def save_tensors(self, rank: int) -> dict[str, PartState]:
        """Return the contributions of the modules and the optimizers to a save."""
        targets = self.targets()
        names = names_of(targets)
        stepped = self._trained()
        saved: dict[str, PartState] = {}
        for part, value in self.by_name.items():
            if isinstance(value, nn.Module):
                saved[part] = save_module(part, value, targets[part], stepped)
            elif isinstance(value, Optimizer):
                saved[part] = save_optimizer(part, value, names, rank)
                self._warn_of_unsaved(part, saved[part].unsaved, rank)
        return saved

    def _warn_of_unsaved(self, part: str, unsaved: Sequence[str], rank: int) -> None:
        if unsaved and rank == 0 and part not in self.warned:
            self.warned.add(part)
            log.warning(
                "%s: %s of a %s hold tensors that its state_dict() does not include, so they are "
                "not saved or restored. If they are state, keep them in optimizer.state, or "
                "implement state_dict() and load_state_dict() for them",
                part,
                ", ".join(unsaved),
                type(self.by_name[part]).__name__,
            )

    def match(
        self, records: Mapping[str, Any], source: PartSource, rank: int
    ) -> dict[str, PartMatch]:
        """Plan how to fill every part that `records` has; change nothing."""
        targets = self.targets()
        names = names_of(targets)
        matched: dict[str, PartMatch] = {}
        for part, record in records.items():
            value = self.by_name[part]
            kind = _kind(value)
            if record["kind"] != kind:
                raise CheckpointError(
                    f"{part}: is a {kind}, but a {record['kind']} in the checkpoint. Pass the part "
                    f"that was saved under this name, or leave it unchanged with skip=[{part!r}]."
                )
            if isinstance(value, nn.Module):
                matched[part] = match_module(part, value, targets[part], record, source)
                base = self.base if part == "model" else None
                if base is not None or "base" in record:
                    # A different base explains every other mismatch.
                    wrong = base_problems(base, record)
                    matched[part].problems = wrong or matched[part].problems
            elif isinstance(value, Optimizer):
                matched[part] = match_optimizer(part, value, record, source, names, rank)
                self._remember_identical(part, matched[part], record)
        # Schedulers come last: they depend on the groups that the optimizers have matched.
        groups, parameters = self._groups_of(matched), LikeParameters(names.values())
        for part in [part for part in records if part not in matched]:
            value = self.by_name[part]
            chosen = groups.get(id(getattr(value, "optimizer", None)))
            matched[part] = match_stateful(
                part, value, records[part], source, rank, groups=chosen, parameters=parameters
            )
        matched = {part: matched[part] for part in records}  # the report has the order of the save
        if any(part.is_regrouped for part in matched.values()):
            check_schedulers(self.by_name, matched)
        if "data" in matched and not source.same_ranks:
            self._check_data(matched["data"], source.ranks)
        return matched

    def _remember_identical(self, part: str, matched: PartMatch, record: Any) -> None:
        """Keep for later saves what was identical on the ranks: unsharded state does not show
        it."""
        commit = matched.commit

        def commit_all() -> None:
            commit()
            self.identical[part] = [*record.get("alike", ())]

        matched.commit = commit_all

    def _check_data(self, matched: PartMatch, num_ranks: int) -> None:
        """Add a problem for another number of ranks if a loader may count within its rank's share:
        such counts are the same on every rank, so nothing in them shows it.
        """
        data = self.by_name["data"]
        if isinstance(data, ElasticLoader) or matched.problems:
            return
        name = type(data).__name__
        if "data" in self.first_rank:
            matched.outcome = Outcome(
                "derived",
                f"a {name} has its position of {count(num_ranks, 'rank')}, which by "
                "first_rank=['data'] is the same on any number of ranks",
            )
            return
        matched.problems.append(
            f"data: a {name} was saved on {count(num_ranks, 'rank')}. If it splits its samples by "
            "rank, its position is meaningless on a different number. Resume on the same number "
            "of ranks; or use an anyrank.ElasticLoader (for shards, "
            "ElasticLoader.from_shards(lengths=...)); or, if all ranks read the same samples, say "
            "so with TrainState(first_rank=['data']); or restart the data with skip=['data']."
        )

    def _groups_of(self, matched: Mapping[str, PartMatch]) -> dict[int, Sequence[int | None]]:
        """Map each optimizer's id to the saved groups that its groups continue from."""
        return {
            id(self.by_name[name]): part.groups
            for name, part in matched.items()
            if part.groups is not None
        }


def names_of(targets: Mapping[str, Sequence[ModelTensor]]) -> dict[int, ModelTensor]:
    """Map the id of each parameter to its tensor, named as in the checkpoint's optimizer."""
    named: dict[int, ModelTensor] = {}
    for part, members in targets.items():
        for target in in_state_dict(members):
            # Not with a ".", because names already contain it.
            name = target.name if part == "model" else f"{part}/{target.name}"
            # A parameter that two modules share has its name in the first of them.
            named.setdefault(id(target.tensor), replace(target, name=name))
    return named


def _kind(part: Any) -> str:
    if isinstance(part, nn.Module):
        return "module"
    return "optimizer" if isinstance(part, Optimizer) else "stateful"
