"""docs/benchmarks.md: which table stands between which markers."""

from __future__ import annotations

from figures import read
from live_tables import (
    exact_table,
    peers_table,
    sync_table,
)
from tables import (
    HERE,
    frozen_table,
    integrations_table,
    kill_table,
    load_tables,
    save_table,
    trap_table,
)

PAGE = HERE.parent / "docs" / "benchmarks.md"

SECTIONS = {
    "load": lambda: load_tables(read("load")),
    "traps": lambda: trap_table(read("traps")),
    "frozen": lambda: frozen_table(read("frozen")),
    "integrations": lambda: integrations_table(read("integrations")),
    "save": lambda: save_table(read("save")),
    "kills": lambda: kill_table(read("kills")),
    "sync": lambda: sync_table(read("sync")),
    "peers": lambda: peers_table(read("peers")),
    "exact": lambda: exact_table(read("exact")),
}


def filled(page: str) -> str:
    """The page with every section between its two marker comments written anew.

    Raises:
        ValueError: a section has no markers.
    """
    for name, make in SECTIONS.items():
        start, stop = f"<!-- {name}: made by benchmarks/plot.py -->", f"<!-- end of {name} -->"
        if page.count(start) != 1 or page.count(stop) != 1:
            raise ValueError(f"{PAGE}: needs one {start} and one {stop}")
        before, rest = page.split(start)
        page = f"{before}{start}\n\n{make()}\n\n{stop}{rest.split(stop)[1]}"
    return page
