"""The error for a source that does not fit a model: near names, wrong prefixes, ways out."""

from __future__ import annotations

from collections.abc import Sequence

from anyrank.files.listing import Listing
from anyrank.models.dialects.dialect import LIVE, ModelMatch
from anyrank.models.options import WAYS_OUT, LoadOptions
from anyrank.models.tensors import ModelTensor
from anyrank.tensors.names import is_of_adapter
from anyrank.tensors.near_names import Near, Shapes, wrong_prefix
from anyrank.wording import join_first, listed

SHOWN = 10
RESIZED = 4  # tensors: an embedding and a head, with their biases
ADAPTERS = (
    "\n  some are of an adapter that the model has not: make it first, with PEFT's "
    "get_peft_model(model, PeftConfig.from_pretrained(folder))"
)


def join_problems(listing: Listing, problems: Sequence[str]) -> str:
    """Join the problems into the text of the error."""
    lines = [_title(listing), *problems]
    if listing.skipped:
        lines.append(listed("not looked at in the source", list(listing.skipped)))
    return "\n".join(lines)


def _title(listing: Listing) -> str:
    where = listing.files[0].path if listing.files else "the source"
    where = "the dict" if listing.format == "memory" else where
    if listing.format == LIVE:
        return "src does not fit dst:"
    return f"{where} ({listing.format}) does not fit the model:"


def describe(
    match: ModelMatch, unfilled: Sequence[ModelTensor], misfits: list[str], options: LoadOptions
) -> list[str]:
    """Describe everything that is wrong with names, shapes and dtypes, in one list.

    Args:
        match: the match of the source and the model.
        unfilled: tensors that the source does not hold, and that are not fresh.
        misfits: problems of the tensors that it holds.
        options: the caller's options.
    """
    listing, tensors, unexpected = match.listing, match.tensors, match.unexpected
    names = [tensor.name for tensor in unfilled]
    on_meta = [tensor.name for tensor in unfilled if tensor.is_meta]
    lines: list[str] = []
    renaming = _renaming(
        {key: listing.tensors[key].shape for key in unexpected},
        {tensor.name: tensor.shape for tensor in unfilled},
    )
    if options.missing == "error" and names:
        lines.append(
            listed("missing in the source", names, Near(unexpected).hint)
            + (renaming if options.unexpected == "ignore" else "")
            + _by_own_code(match, unfilled)
            + f"\n  to go on: {options.ways_out['missing']}"
        )
    elif options.missing == "keep" and on_meta:
        lines.append(
            listed("missing in the source, and on meta, so there is nothing to keep", on_meta)
            + "\n  to go on: missing='init'"
        )
    if options.unexpected == "error" and unexpected:
        lines.append(
            listed("unexpected in the source", unexpected, Near(names or _names(tensors)).hint)
            + renaming
            + (ADAPTERS if any(is_of_adapter(k) or ".lora_" in k for k in unexpected) else "")
            + f"\n  to go on: {options.ways_out['unexpected']}"
        )
    lines += misfits[:SHOWN]
    if len(misfits) > SHOWN:
        lines.append(f"... and {len(misfits) - SHOWN} more that do not fit")
    resized = [tensors[i].name for i, t in match.wanted if t.shape != tensors[i].shape]
    # If there are more, it is another model; a resume has its own ways out.
    if resized and len(resized) <= RESIZED and options.ways_out is WAYS_OUT:
        left_out = dict.fromkeys(resized, "")
        lines.append(
            "  to go on: a model of the source's sizes; or, for a vocabulary or a head of another "
            f"size, rename={left_out!r} with missing='init'"
        )
    return lines


def _by_own_code(match: ModelMatch, unfilled: Sequence[ModelTensor]) -> str:
    """The way out if modules' own code makes tensors of the source's keys, as for a fused weight.

    Without it, the first way would leave weights out that the source has.
    """
    above = {id(m) for target in unfilled for entry in target.registrations for m in entry.path}
    names = [name for name, module in match.own_code.modules.items() if id(module) in above]
    if not names or not match.unexpected:
        return ""
    return (
        f"\n  {join_first(names, SHOWN)}: has load_state_dict code of its own, which is not run, "
        "and may make these of the source's other keys: let it do so in a whole model, "
        "whole.load_state_dict(...), and load whole.state_dict()"
    )


def _names(targets: list[ModelTensor]) -> list[str]:
    return [entry.name for target in targets for entry in target.registrations]


def _renaming(unexpected: Shapes, unfilled: Shapes) -> str:
    """Suggest the rename= that places most of the keys, if only a prefix is wrong.

    If several do, as for a teacher and a student, list all of them.
    """
    changes = wrong_prefix(unexpected, unfilled)
    renames = [
        f"rename={ {old.removesuffix('.'): new.removesuffix('.')} if old else [('^', new)]!r}"
        for old, new, _ in changes
    ]
    return f"\n  {changes[0][2]} of them fit with {', or with '.join(renames)}" if changes else ""
