"""Convert a live model.

The ranks save its weights next to the destination, and the first rank converts these.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.files.manifest import RankFiles
from anyrank.files.storage import storing
from anyrank.loading.verify import compare_replicas, content_hashes
from anyrank.models.alike import (
    check_alike,
    differing_replicas,
    find_coordinates,
    inventory_of,
)
from anyrank.models.dialects.layouts.given import (
    apply_layout,
    join_parts,
    warn_about_unused_layout,
)
from anyrank.models.dialects.peft.merging import as_merged
from anyrank.models.own_code import (
    added_to_state_dict,
    changed_in_state_dict,
    extra_states,
)
from anyrank.models.spreads import spreads_of
from anyrank.models.tensors import ModelTensor, find_tensors, in_state_dict
from anyrank.runs.saving.rank_file import make_items, write_share
from anyrank.sources.readers.joining import join
from anyrank.sources.readers.memory import list_memory
from anyrank.sources.step_index import index_of
from anyrank.sources.step_listing import list_step
from anyrank.sources.tables.choice import unused_renames
from anyrank.sources.tables.renaming import renamer
from anyrank.tensors.names import Rename
from anyrank.tensors.sharded_tensor import ShardedTensor, shared
from anyrank.tensors.spread import Spread
from anyrank.tensors.writes import plan_writes
from anyrank.tools.convert.destination import STORE, Destination, destination
from anyrank.tools.convert.file_names import as_files, configuration, without_average
from anyrank.tools.convert.options import ConvertOptions
from anyrank.tools.convert.report import ConvertReport
from anyrank.tools.convert.selection import Selection
from anyrank.tools.convert.stored import convert_listing
from anyrank.wording import count
from anyrank.world.alike import join_digests
from anyrank.world.arguments import compare_arguments
from anyrank.world.group import Group
from anyrank.world.ranks import Ranks, open_ranks


def convert_live(
    src: object,
    dst: str | os.PathLike[str],
    checked: Callable[[], ConvertOptions],
    process_group: Group,
) -> ConvertReport:
    """Convert a model, as `convert` does. Collective.

    Args:
        src: the model; `checked` raises for anything else.
        dst: as for `convert`.
        checked: returns the options, and raises for wrong arguments.
        process_group: as for `convert`.
    """
    start = time.perf_counter()
    with torch.inference_mode(False), open_ranks(process_group, "convert()") as ranks:
        options, target = _agreed(dst, checked, ranks)
        assert isinstance(src, nn.Module)
        model = src
        target = replace(target, token=ranks.run_on_one("naming the folder", lambda: target.token))
        tensors, extras = ranks.run(
            "looking at the model", lambda: _find_written(model, options, ranks)
        )
        if options.layout is not None:
            join_parts([tensors], ranks)
        _, inventory = ranks.run_and_reduce(
            "describing the model", lambda: (None, inventory_of(tensors, ranks)), join_digests
        )
        check_alike("the ranks' models differ", tensors, inventory, ranks, LoadError)
        coordinates = find_coordinates(tensors, inventory, ranks)
        pairs = ((alias.name, t.name) for t in tensors for alias in t.registrations[1:])
        tied = {alias: name for alias, name in pairs if alias != name}
        # Only the ties of the first rank are written, so they must be the same on every rank.
        ties = {f"tie of {alias}": name for alias, name in tied.items()}
        compare_arguments(ranks, "convert", ties, LoadError)
        replicas = [pair for pair in shared(tensors, coordinates) if not pair[0].may_differ]
        compare_replicas(replicas, ranks)
        # These may differ between ranks. The first rank's are written, and the report says so.
        whole = [
            *(tensor for tensor in tensors if tensor.may_differ),
            *(ShardedTensor(k, v, tuple(v.shape), None, None) for k, v in extras.items()),
        ]
        differ = differing_replicas([(t, ranks.ranks) for t in whole], ranks, content_hashes)

        def convert(listing: Listing) -> ConvertReport:
            names = [*(tensor.name for tensor in tensors), *extras]
            weights = {name: listing.tensors[name] for name in names}
            selection = as_files(Selection(weights, tied), listing, model, tensors)
            selection = _renamed(selection, listing, options.rename)
            has_configuration = options.format.has_configuration and not target.is_file
            small = configuration(model, options.cast_dtype) if has_configuration else {}
            return convert_listing(listing, selection, target, options, small=small)

        if ranks.size == 1:
            local = {tensor.name: tensor.local() for tensor in tensors}
            report = convert(list_memory(local | extras))
        else:
            spreads = spreads_of(tensors, coordinates, ranks)
            with _saved(tensors, spreads, target, ranks) as saved:
                report = ranks.run_on_one("converting", lambda: convert(_joined(saved(), extras)))
    return replace(
        report,
        source=type(model).__name__,
        skipped=[*report.skipped, *_skipped(model, differ, extras)],
        verified=f"{count(len(replicas), 'tensor')} compared between ranks" if replicas else "",
        seconds=time.perf_counter() - start,
    )


@contextlib.contextmanager
def _saved(
    tensors: Sequence[ModelTensor],
    spreads: Sequence[Spread],
    target: Destination,
    ranks: Ranks,
) -> Generator[Callable[[], Listing], None, None]:
    """Save the weights next to the destination for the time of the block. Collective.

    Yields:
        A function that lists the saved weights, for the first rank.

    Raises:
        CheckpointError: a rank cannot write; raised on every rank.
    """
    folder = f"{target.folder}-weights"

    def make() -> None:
        with storing(folder):
            STORE.make_folder(folder)

    plan = plan_writes(tensors, spreads, ranks.size)
    index = index_of(tensors, plan).to_bytes()

    def write_own() -> RankFiles:
        items = make_items(tensors, plan.writes_of(ranks.index))
        return write_share(STORE, folder, ranks.index, items, {}, {})

    try:
        ranks.run_on_one("making the folder", make)
        _, files = ranks.run_and_collect("writing the weights", lambda: (None, write_own()))
        yield lambda: list_step(STORE, folder, files or (), index).listing
    finally:
        if ranks.index == 0:
            with contextlib.suppress(OSError):
                STORE.remove_folder(folder)


def _renamed(selection: Selection, listing: Listing, rename: Rename) -> Selection:
    """Rename the selected tensors as `rename=` says, and leave out those whose names become empty.

    Raises:
        LoadError: two tensors get the same name, or no tensor is left.
    """
    owners = {name: name for name in selection.tensors} | selection.tied
    whole = listing.with_tensors({n: selection.tensors[owner] for n, owner in owners.items()})
    idle = unused_renames(rename, whole, whole, owners)
    new_name = renamer(rename)
    names = {name: new for name in owners if (new := new_name(name))}
    # An owner that is left out is written under the name of a tied tensor.
    first: dict[str, str] = {}
    for name, new in names.items():
        first.setdefault(owners[name], new)
    twice = [name for name, number in Counter(names.values()).items() if number > 1]
    if twice:
        raise LoadError(
            f"rename= maps two tensors of the model to the name {twice[0]}. Rename one of them"
        )
    if not names:
        raise LoadError("rename= leaves out every tensor of the model. Keep at least one")
    renamed = {key: names[name] for key, name in selection.renamed.items() if name in names}
    known = {*selection.renamed.values()}
    renamed |= {name: new for name, new in names.items() if new != name and name not in known}
    left_out = [name for name in owners if name not in names]
    return replace(
        selection,
        tensors={first[name]: t for name, t in selection.tensors.items() if name in first},
        tied={new: first[owners[n]] for n, new in names.items() if new != first[owners[n]]},
        renamed=renamed,
        skipped=(*selection.skipped, *(f"{n}: rename= leaves it out" for n in left_out), *idle),
    )


def _joined(saved: Listing, extras: Mapping[str, torch.Tensor]) -> Listing:
    """Join the saved tensors and the extra state of the first rank."""
    return join(saved.format, [saved, list_memory(extras)]) if extras else saved


def _skipped(model: nn.Module, differ: Iterable[str], extras: Collection[str]) -> list[str]:
    """Return texts about values that the output lacks, or that differ, with the reasons."""
    return [
        *(f"{name}: differs between ranks; that of the first rank was written" for name in differ),
        *(
            f"{key}: extra state of a module, which is not a tensor"
            for key in extra_states(model)
            if key not in extras
        ),
        *(f"{key}: added by custom code of a module" for key in added_to_state_dict(model)),
    ]


def _agreed(
    dst: str | os.PathLike[str], checked: Callable[[], ConvertOptions], ranks: Ranks
) -> tuple[ConvertOptions, Destination]:
    """Agree on the options and the destination. Collective.

    Raises:
        ValueError, TypeError, LoadError: arguments are wrong or differ; raised on every rank.
    """
    answers: list[tuple[ConvertOptions, Destination]] = []
    arguments: dict[str, object] = {}  # filled by `check`, which runs before they are compared

    def check() -> None:
        options = checked()
        arguments["dst"] = os.fspath(dst)
        arguments.update((name, getattr(options, name)) for name in options.__dataclass_fields__)
        arguments["layout"] = options.layout is not None  # ranks may pass different layouts
        target = destination(dst, [], options.is_file(dst), options.overwrite)
        answers.append((options, target))

    compare_arguments(ranks, "convert", arguments, LoadError, check)
    return answers[0]


def _find_written(
    model: nn.Module, options: ConvertOptions, ranks: Ranks
) -> tuple[list[ModelTensor], dict[str, torch.Tensor]]:
    """Return the tensors to write, with the mark of those that may differ between ranks, and extra
    state that is a tensor.

    Raises:
        LoadError: a tensor cannot be written as it is, or does not match `layout=`.
    """
    targets = find_tensors(model)
    apply_layout(targets, options.layout, ranks)
    warn_about_unused_layout(options.layout, targets)
    tensors = without_average(in_state_dict(targets))
    adapters = [tensor.name for tensor in tensors if tensor.adapter]
    if adapters:
        merged = as_merged(tensors)
        adapters, tensors = ([], merged) if merged is not None else (adapters, tensors)
    on_meta = [tensor.name for tensor in tensors if tensor.is_meta]
    if adapters:
        raise LoadError(
            f"{adapters[0]}: belongs to an adapter. First merge it into the model "
            "(merge_and_unload, anyrank.integrations.peft.merge), or save the adapter with PEFT"
        )
    if on_meta:
        raise LoadError(
            f"{on_meta[0]}: is on the meta device, so it has no values. First load the model"
        )
    if changed := changed_in_state_dict(model):
        raise LoadError(
            f"{changed[0]}: custom code of its module changes it in state_dict() "
            f"({count(len(changed), 'tensor')} of this model), but convert writes tensors "
            "unchanged. Convert the file of torch.save(model.state_dict()) instead"
        )
    if not tensors:
        raise LoadError("the model has no parameters or buffers to write")
    for tensor in tensors:
        tensor.may_differ = tensor.kind == "buffer" and tensor.layout is None
    extras = {
        key: value.detach()
        for key, value in extra_states(model).items()
        if type(value) in (torch.Tensor, nn.Parameter)
        and value.layout == torch.strided
        and not value.is_meta
    }
    return tensors, extras
