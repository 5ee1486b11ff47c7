"""The error for a source that does not match a model: similar names, wrong prefixes, ways out."""

from __future__ import annotations

import re
from collections.abc import Sequence

from anyrank.files.listing import Listing
from anyrank.models.dialects.dialect import ModelMatch
from anyrank.models.options import WAYS_OUT, LoadOptions
from anyrank.models.parametrizations import as_pairs, renamed_parts, wholes
from anyrank.models.tensors import ModelTensor
from anyrank.tensors.names import is_of_adapter
from anyrank.tensors.near_names import Near, Shapes, rename_of, wrong_prefix
from anyrank.wording import count, join_first, listed

SHOWN = 10
RESIZED = 4  # tensors: an embedding and a head, with biases
ADAPTERS = (
    "\n  some belong to an adapter that the model does not have; create it first with PEFT: "
    "get_peft_model(model, PeftConfig.from_pretrained(folder))"
)


def join_problems(listing: Listing, problems: Sequence[str]) -> str:
    """Join the problems into the text of the error."""
    lines = [_title(listing), *problems]
    if listing.skipped:
        lines.append(listed("skipped in the source", listing.skipped_texts))
    return "\n".join(lines)


def _title(listing: Listing) -> str:
    where = listing.files[0].path if listing.files else "the source"
    where = "the dict" if listing.format == "memory" else where
    if listing.is_live:
        return "src does not match dst:"
    return f"{where} ({listing.format}) does not match the model:"


def mismatch_lines(
    match: ModelMatch, unfilled: Sequence[ModelTensor], misfits: list[str], options: LoadOptions
) -> list[str]:
    """Return the error texts for all problems with names, shapes and dtypes.

    Args:
        match: the match of the source and the model.
        unfilled: tensors that the source does not have, and that are not fresh.
        misfits: problems of the tensors that it has.
        options: the caller's options.
    """
    names = [tensor.name for tensor in unfilled]
    # Ways out that keep all weights come first, once.
    keeping = _renaming(
        {key: match.listing.tensors[key].shape for key in match.unexpected},
        {tensor.name: tensor.shape for tensor in unfilled},
    ) + _in_parts(match.unexpected, names)
    lists_missing = options.missing == "error" and bool(names)
    lines = _missing_lines(match, unfilled, options, keeping)
    lines += _unexpected_lines(match, names, options, "" if lists_missing else keeping)
    lines += misfits[:SHOWN]
    if len(misfits) > SHOWN:
        lines.append(f"and {count(len(misfits) - SHOWN, 'more mismatch', 'more mismatches')}")
    # A resume has its own ways out.
    return lines + (_resized_lines(match) if options.ways_out is WAYS_OUT else [])


def _missing_lines(
    match: ModelMatch, unfilled: Sequence[ModelTensor], options: LoadOptions, keeping: str
) -> list[str]:
    """Return the text for tensors that the source does not have; `keeping` are its ways out that
    keep all weights.
    """
    names = [tensor.name for tensor in unfilled]
    on_meta = [tensor.name for tensor in unfilled if tensor.is_meta]
    if options.missing == "error" and names:
        return [
            listed("missing from the source", names, Near(match.unexpected).hint)
            + keeping
            + _by_own_code(match, unfilled)
            + f"\n  Fix: {options.ways_out['missing']}"
        ]
    if options.missing == "keep" and on_meta:
        return [
            listed(
                "missing from the source; these tensors are on meta, so missing='keep' has no "
                "values to keep",
                on_meta,
            )
            + "\n  Fix: pass missing='init'"
        ]
    return []


def _unexpected_lines(
    match: ModelMatch, unfilled_names: Sequence[str], options: LoadOptions, keeping: str
) -> list[str]:
    """Return the text for keys of the source that fill no tensor."""
    unexpected = match.unexpected
    if options.unexpected != "error" or not unexpected:
        return []
    has_adapter = any(is_of_adapter(key) or ".lora_" in key for key in unexpected)
    return [
        listed(
            "unexpected in the source",
            unexpected,
            Near(unfilled_names or _names(match.tensors)).hint,
        )
        + keeping
        + (ADAPTERS if has_adapter else "")
        + f"\n  Fix: {options.ways_out['unexpected']}"
    ]


def _resized_lines(match: ModelMatch) -> list[str]:
    """Return the way out for tensors that have a different size in the source."""
    # Packed numbers have different shapes than the weights that they stand for.
    resized = [
        match.tensors[i].name
        for i, t in match.wanted
        if t.shape != match.tensors[i].shape
        and t.dtype.is_floating_point == match.tensors[i].dtype.is_floating_point
    ]
    if not resized:
        return []
    if len(resized) > RESIZED:
        return ["  Fix: check that the source belongs to the configuration of this model"]
    left_out = dict.fromkeys(resized, "")
    return [
        "  Fix: build the model with the source's sizes; or, if a vocabulary or head size was "
        f"changed on purpose, pass rename={left_out!r} and missing='init'"
    ]


def _by_own_code(match: ModelMatch, unfilled: Sequence[ModelTensor]) -> str:
    """Return the way out if code of modules may make the tensors from the source's keys.

    For a fused weight, the other ways out would give up weights that the source has.
    """
    above = {id(m) for target in unfilled for entry in target.registrations for m in entry.path}
    names = [name for name, module in match.own_code.modules.items() if id(module) in above]
    if not names or not match.unexpected:
        return ""
    return (
        f"\n  {join_first(names, SHOWN)}: overrides load_state_dict; anyrank does not run that "
        "code, which may make these tensors from other keys of the source. Run it once on an "
        "unsharded model (whole.load_state_dict(...)), and pass whole.state_dict() as the source."
    )


def _names(targets: list[ModelTensor]) -> list[str]:
    return [entry.name for target in targets for entry in target.registrations]


def _renaming(unexpected: Shapes, unfilled: Shapes) -> str:
    """Suggest the rename= that matches most of the keys, if only a prefix is wrong.

    If several do, such as for a teacher and a student, list all of them. Parts of a tensor may also
    have the names of torch's other form of norms.
    """
    parts = renamed_parts([*unexpected])
    named = {parts.get(key, key): shape for key, shape in unexpected.items()}
    changes = wrong_prefix(named, unfilled)
    if not parts:
        renames = [rename_of(old, new) for old, new, _ in changes]
        return _matching(changes[0][2], renames) if changes else ""
    number = sum(named[name] == unfilled.get(name) for name in parts.values())
    renaming = as_pairs(parts)
    if changes:
        old, new, number = changes[0]
        if isinstance(renaming, list):
            renaming = [("^" + re.escape(old), new), *renaming]
        else:
            renaming = {k: new + parts.get(k, k).removeprefix(old) for k in unexpected}
    return _matching(number, [renaming]) if number else ""


def _matching(number: int, renames: Sequence[object]) -> str:
    verb = "matches" if number == 1 else "match"
    options = ", or with ".join(f"rename={r!r}" for r in renames)
    return f"\n  {number} of them {verb} with {options}"


def _in_parts(unexpected: Sequence[str], unfilled: Sequence[str]) -> str:
    """Return the way out for a tensor that one side has as a whole, and the other in parts."""
    stored, wanted = wholes(unexpected), wholes(unfilled)
    for name in unfilled:
        if name in stored:
            return (
                f"\n  the source has {name} in parts ({', '.join(stored[name])}), which "
                "weight_norm, spectral_norm or prune of torch.nn.utils creates. Apply the same to "
                "the model before the load, and remove it afterwards."
            )
    for name in unexpected:
        if name in wanted:
            return (
                f"\n  the source has {name} as one tensor, but the model has it in parts "
                f"({', '.join(wanted[name])}). Load the model before you apply weight_norm, "
                "spectral_norm or prune."
            )
    return ""
