"""The error for a source that does not fit a model: near names, wrong prefixes, ways out."""

from __future__ import annotations

import re
from collections.abc import Sequence

from anyrank.files.listing import Listing
from anyrank.models.dialects.dialect import LIVE, ModelMatch
from anyrank.models.options import WAYS_OUT, LoadOptions
from anyrank.models.tensors import ModelTensor
from anyrank.tensors.names import is_of_adapter
from anyrank.tensors.near_names import Near, Shapes, wrong_prefix
from anyrank.tensors.parametrizations import as_pairs, renamed_parts, wholes
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
    # Ways out that give no weights up come first.
    keeping = _renaming(
        {key: listing.tensors[key].shape for key in unexpected},
        {tensor.name: tensor.shape for tensor in unfilled},
    ) + _in_parts(unexpected, names)
    if options.missing == "error" and names:
        lines.append(
            listed("missing in the source", names, Near(unexpected).hint)
            + keeping
            + _by_own_code(match, unfilled)
            + f"\n  to go on: {options.ways_out['missing']}"
        )
        keeping = ""
    elif options.missing == "keep" and on_meta:
        lines.append(
            listed("missing in the source, and on meta, so there is nothing to keep", on_meta)
            + "\n  to go on: missing='init'"
        )
    if options.unexpected == "error" and unexpected:
        lines.append(
            listed("unexpected in the source", unexpected, Near(names or _names(tensors)).hint)
            + keeping
            + (ADAPTERS if any(is_of_adapter(k) or ".lora_" in k for k in unexpected) else "")
            + f"\n  to go on: {options.ways_out['unexpected']}"
        )
    lines += misfits[:SHOWN]
    if len(misfits) > SHOWN:
        lines.append(f"... and {len(misfits) - SHOWN} more that do not fit")
    # Packed numbers have other shapes than the weights that they stand for.
    resized = [
        tensors[i].name
        for i, t in match.wanted
        if t.shape != tensors[i].shape
        and t.dtype.is_floating_point == tensors[i].dtype.is_floating_point
    ]
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

    If several do, as for a teacher and a student, list all of them. Parts of a tensor may have the
    names of torch's other norms, too.
    """
    parts = renamed_parts([*unexpected])
    named = {parts.get(key, key): shape for key, shape in unexpected.items()}
    changes = wrong_prefix(named, unfilled)
    if not parts:
        renames: list[object] = [
            {old.removesuffix("."): new.removesuffix(".")} if old else [("^", new)]
            for old, new, _ in changes
        ]
        return _fitting(changes[0][2], renames) if changes else ""
    count = sum(named[name] == unfilled.get(name) for name in parts.values())
    renaming = as_pairs(parts)
    if changes:
        old, new, count = changes[0]
        if isinstance(renaming, list):
            renaming = [("^" + re.escape(old), new), *renaming]
        else:
            renaming = {k: new + parts.get(k, k).removeprefix(old) for k in unexpected}
    return _fitting(count, [renaming]) if count else ""


def _fitting(count: int, renames: Sequence[object]) -> str:
    return f"\n  {count} of them fit with " + ", or with ".join(f"rename={r!r}" for r in renames)


def _in_parts(unexpected: Sequence[str], unfilled: Sequence[str]) -> str:
    """Name a tensor that one side has as a whole, and the other one in parts."""
    stored, wanted = wholes(unexpected), wholes(unfilled)
    for name in unfilled:
        if name in stored:
            return (
                f"\n  {name} is in the source, in parts ({', '.join(stored[name])}) that a norm of "
                "torch.nn.utils made of it: give the model the same norm before the load, and "
                "remove it after"
            )
    for name in unexpected:
        if name in wanted:
            return (
                f"\n  {name} of the source is a whole tensor, which the model has in parts "
                f"({', '.join(wanted[name])}): load before a norm of torch.nn.utils makes them"
            )
    return ""
