"""The version of anyrank, the tested versions of torch and frameworks, and warnings for others."""

from __future__ import annotations

import functools
import logging
import os
import re

__version__ = "0.1.0"

log = logging.getLogger("anyrank")

# The table in docs/reference.md lists what was run on each.
TESTED_TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
# Minor versions of frameworks, by their names on PyPI.
TESTED = {
    "accelerate": "1.15",
    "lightning": "2.6",
    "peft": "0.21",
    "pytorch_lightning": "2.6",
    "torchtitan": "0.3",
    "transformers": "5.23",
}


def untested_torch(installed: str) -> str | None:
    """Return a warning about a torch version that was not tested; None for a tested one.

    Args:
        installed: a version such as `torch.__version__`; only its first two numbers count.
    """
    match = re.match(r"(\d+)\.(\d+)", installed)
    tested = {tuple(version.split(".")[:2]) for version in TESTED_TORCH}
    if match and match.groups() in tested:
        return None
    return (
        f"anyrank is not tested with torch {installed}, only with {TESTED_TORCH[0]} to "
        f"{TESTED_TORCH[-1]}. Before you rely on it, run `make compat TORCH={installed}` in a "
        "clone of anyrank"
    )


@functools.cache
def warn_of_untested_torch(installed: str) -> None:
    """Log `untested_torch` once per process: on rank 0, or in a process without a launcher."""
    reason = untested_torch(installed)
    if reason is not None and os.environ.get("RANK", "0") == "0":
        log.warning("%s", reason)


@functools.cache
def warn_if_untested(package: str) -> None:
    """Log a warning once if the installed minor version of a framework was not tested.

    Args:
        package: a key of `TESTED`.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version(package)
    except PackageNotFoundError:
        return  # importable without being installed, so its version is unknown
    if re.findall(r"\d+", installed)[:2] != TESTED[package].split("."):
        log.warning(
            "%s %s is untested (tested: %s): anyrank continues, and raises an error if an "
            "interface that it uses has changed",
            package,
            installed,
            TESTED[package],
        )
