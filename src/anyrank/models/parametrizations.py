"""Names of the parts in which weight_norm and spectral_norm of torch keep one tensor."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

# What torch.nn.utils (and its prune) adds to a tensor's name -> the same part's name below
# `parametrizations.<tensor>`, where torch.nn.utils.parametrizations keeps it; "" if it does not.
FORMS: Sequence[Mapping[str, str]] = (
    {"_g": "original0", "_v": "original1"},
    {"_orig": "original", "_u": "0._u", "_v": "0._v"},
    {"_orig": "", "_mask": ""},
)
SUFFIXES = {new: old for form in FORMS for old, new in form.items() if new}
PARAMETRIZED = re.compile(r"(?:^|(?<=\.))parametrizations\.([^.]+)\.(.+)$")


def renamed_parts(names: Collection[str]) -> dict[str, str]:
    """Map names of parts of tensors to their names in the other one of torch's two forms."""
    return {name: new for name, (_, new) in _parts(names).items() if new}


def wholes(names: Collection[str]) -> dict[str, list[str]]:
    """Map names of tensors that are kept in parts to the names of their parts."""
    by_whole: dict[str, list[str]] = {}
    for name, (whole, _) in _parts(names).items():
        by_whole.setdefault(whole, []).append(name)
    return by_whole


def as_pairs(renamed: Mapping[str, str]) -> list[tuple[str, str]] | dict[str, str]:
    """Return the shortest `rename=` for a result of `renamed_parts`: a regex per kind of part."""
    ends: dict[str, str] = {}
    for name, new in renamed.items():
        start = len(_common_path(name, new))
        if ends.setdefault(name[start:], new[start:]) != new[start:]:
            return dict(renamed)  # `weight_v` is a part of both norms
    return [(rf"\b{re.escape(end)}$", new) for end, new in ends.items()]


def _parts(names: Collection[str]) -> dict[str, tuple[str, str]]:
    """Map names of parts to their tensor's name, and to their names in the other form."""
    pairs: dict[str, tuple[str, str]] = {}
    known = {*names}
    for name in names:
        match = PARAMETRIZED.search(name)
        if match is not None and match[2] in SUFFIXES:
            whole = name[: match.start()] + match[1]
            pairs[name] = whole, whole + SUFFIXES[match[2]]
        for form in () if match else FORMS:
            whole, end = next(
                ((name.removesuffix(e), e) for e in form if name.endswith(e)), ("", "")
            )
            if whole and all(whole + other in known for other in form):
                before, dot, tensor = whole.rpartition(".")
                new = f"{before}{dot}parametrizations.{tensor}.{form[end]}" if form[end] else ""
                pairs[name] = whole, new
                break
    return pairs


def _common_path(name: str, other: str) -> str:
    """Return the path that two names have in common, up to and including its last dot."""
    parts = [a == b for a, b in zip(name.split("."), other.split("."), strict=False)]
    count = parts.index(False) if False in parts else len(parts)
    return "".join(f"{part}." for part in name.split(".")[:count])
