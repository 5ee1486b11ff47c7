"""The versions of a framework that its integration was tested with."""

from __future__ import annotations

import logging
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version

log = logging.getLogger("anyrank.integrations")


@cache
def warn_if_untested(package: str, oldest: str, newest: str) -> None:
    """Log one line if the installed version of a package is outside of what was tested.

    Args:
        package: as pip names it.
        oldest: the first version that was tested.
        newest: the last version that was tested; its later patch releases count as tested.
    """
    try:
        installed = version(package)
    except PackageNotFoundError:
        return  # on the path without being installed: its version is unknown
    if not _release(oldest)[:2] <= _release(installed)[:2] <= _release(newest)[:2]:
        log.warning(
            "%s %s is installed, and its integration was tested with %s to %s: it goes on, and "
            "refuses what it does not find",
            package,
            installed,
            oldest,
            newest,
        )


def _release(text: str) -> tuple[int, ...]:
    """The numbers of a version: "2.6.0rc1" -> (2, 6, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
