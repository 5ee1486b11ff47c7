"""The benchmarks parse, sum up as they say, and their committed results hold every figure.

Nothing is measured here: a measurement in a test suite tells how busy the machine was.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
Import = Callable[[str], ModuleType]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Import]:
    """Imports a benchmark's module as the script itself does, and forgets all of them after."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for script in SCRIPTS:
        sys.modules.pop(script.stem, None)


def result(name: str) -> dict[str, Any]:
    return dict(json.loads((FOLDER / "results" / f"{name}.json").read_text(encoding="utf-8")))


def summed(times: dict[str, list[float]], peak: float, load: Any) -> Any:
    """Rows of made-up runs on 4 ranks, by contender; all with this peak."""
    timed = {name: [{"usable_sec": sec} for sec in seconds] for name, seconds in times.items()}
    numbers = {"peak_x": peak, "beyond_mib_per_rank": 2.0, "usable_sec": 99.0}
    return load.summarise("fsdp bf16 4", timed, {name: [numbers] for name in times})


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses_and_says_what_it_is(script: Path) -> None:
    assert ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))


def test_ways_take_turns_and_a_warm_up_does_not_count(module: Import) -> None:
    order: list[tuple[str, int]] = []

    def once(way: str, number: int) -> dict[str, Any]:
        order.append((way, number))
        return {"sec": number + 1}

    runs = module("bench").Case("case", {"a": 1, "b": 2}, once).run(2, warm=1)
    assert order == [("b", -1), ("a", -1), ("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert runs == {"a": [{"sec": 1}, {"sec": 2}], "b": [{"sec": 1}, {"sec": 2}]}
    later = {"a": [{"sec": 0}, {"sec": 5}], "b": [{"sec": 9}, {"sec": 1}]}
    both = module("bench").slowest([runs, later])
    assert both == {"a": [{"sec": 1}, {"sec": 5}], "b": [{"sec": 9}, {"sec": 2}]}


def test_a_part_or_a_quick_run_writes_no_results(
    module: Import, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = module("bench")
    monkeypatch.setattr(bench, "FOLDER", tmp_path)

    def written(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["benchmarks/made.py", *arguments])
        given: dict[str, Any] = {"parts": ["ways"], "ways": ["a", "b"], "size": 4}
        bench.main("made", lambda options: vars(options), {"size": 1}, **given)
        return dict(bench.read("made"))

    assert written("--quick") == written("--ways", "a") == {}
    assert written("--size", "7")["size"] == 7
    assert written()["command"] == "python benchmarks/made.py"


def test_random_model_has_the_size_asked_for(module: Import) -> None:
    for gib in (0.1, 1.0, 1.4, 2.0):
        sizes = module("weights").llama_config(gib)
        hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
        layer = 4 * hidden * hidden + 3 * hidden * inner
        nbytes = 2 * (sizes["num_hidden_layers"] * layer + 2 * hidden * sizes["vocab_size"])
        assert nbytes == pytest.approx(gib * 2**30, rel=0.06)


def test_ratios_are_of_the_same_repetition_and_skip_memory_runs(module: Import) -> None:
    rows = summed({"hand": [1.0, 4.0], "anyrank": [2.0, 2.0]}, 1.01, module("load"))
    ours = next(row for row in rows if row["contender"] == "anyrank")
    assert ours["time_x_hand"] == {"median": 1.25, "least": 0.5, "most": 2.0, "n": 2}
    assert ours["usable_sec"]["most"] == 2.0


def test_goals_can_be_missed(module: Import) -> None:
    load = module("load")
    good = summed({"hand": [1.0], "dcp": [2.0], "anyrank": [1.0]}, 1.02, load)
    assert [goal["met"] for goal in load.goals_of(good)] == [True] * 4
    bad = summed({"hand": [1.0], "dcp": [1.0], "anyrank": [1.1]}, 1.04, load)
    assert [goal["met"] for goal in load.goals_of(bad)] == [False, True, False, False]


def test_recorded_results_of_loading_cover_all_and_nothing_was_loaded_wrong(module: Import) -> None:
    load = module("load")
    rows = result("load")["rows"]
    groups = load.groups_of(module("bench").parse(load.OPTIONS, None, []))
    named = {(load.name_of(group), name) for group in groups for name in load.CONTENDERS}
    able = {
        (group, name) for group, name in named if group.split()[0] in load.CONTENDERS[name].layouts
    }
    assert {(row["group"], row["contender"]) for row in rows} == able
    assert [row for row in rows if row["wrong"]] == []
    left_out = {row["not_run"] for row in rows if "not_run" in row}
    assert all("GiB of memory" in reason for reason in left_out)
    assert [
        row for row in rows if row["contender"] in ("hand", "anyrank") and "not_run" in row
    ] == []


def test_recorded_results_of_loading_are_within_the_promised_memory() -> None:
    goals = [goal for goal in result("load")["goals"] if "memory" in goal["what"]]
    goals += [goal for goal in result("load")["goals"] if "MiB" in goal["what"]]
    assert len(goals) >= 16
    assert [goal for goal in goals if goal["value"] > goal["at_most"]] == []


def test_recorded_traps_are_not_silent_in_anyrank(module: Import) -> None:
    found, traps = result("traps"), module("traps")
    assert [row["row"] for row in found["rows"]] == list(traps.ROWS)
    assert found["ways"] == traps.WAYS
    ours = {row["row"]: row["cells"]["anyrank"]["verdict"] for row in found["rows"]}
    assert {
        name: said for name, said in ours.items() if said.split()[0] in ("SILENT:", "broken", "-")
    } == {}
    peers = [cell["verdict"] for row in found["rows"] for cell in row["cells"].values()]
    assert sum(verdict.startswith("SILENT") for verdict in peers) > 20
    assert "broken" not in peers


def test_trap_verdicts(module: Import) -> None:
    traps = module("traps")
    row, plain = traps.Row("damaged", verify=True), traps.Row("plain")

    def cell(**changed: Any) -> dict[str, Any]:
        return {"class": "", "wrong": [], "heard": [], "ran_code": False, **changed}

    warned = cell(wrong=["a"], heard=["1 tensors not finite: a"])
    assert traps.verdict([cell(), cell()], plain) == "right"
    assert traps.verdict([cell(), cell(wrong=["a"])], plain) == "SILENT: 1 wrong"
    assert traps.verdict([warned, cell()], row) == "told"
    assert traps.verdict([warned, cell()], plain) == "SILENT: 1 wrong, warns"
    assert traps.verdict([cell(**{"class": "LoadError"})] * 2, plain) == "error (LoadError)"
    assert traps.verdict([cell(ran_code=True)], plain) == "SILENT: ran code"


def test_recorded_cost_of_a_frozen_part_under_ddp_is_nothing() -> None:
    rows = {row["kind"]: row for row in result("frozen")["rows"]}
    frozen = rows["freeze"]
    assert (frozen["frozen_built_bytes"], frozen["frozen_step_bytes"]) == (0, 0)
    assert frozen["a_rank_that_differs"] == "raises on all ranks"
    assert rows["default"]["frozen_step_bytes"] > 3 * 128 * 2**20


def test_recorded_syncs_send_each_byte_once_and_take_less_time() -> None:
    ours = [row for row in result("sync")["rows"] if row.get("way") == "anyrank.sync"]
    assert len(ours) >= 2
    for row in ours:
        least = row["mib"] * {"2 to 2 others": 1, "the same 4": 3 / 8}[row["case"]]
        assert sum(row["sent_mib"]) <= 1.01 * least
        assert row["of_baseline"] <= 0.6
        assert max(row["memory_mib"]) <= 16


def test_recorded_saves_are_within_the_promised_memory() -> None:
    rows, share = result("save")["rows"], result("save")["mib"] / result("save")["ranks"]
    assert rows["anyrank"]["beyond_mib"] < 64
    assert rows["anyrank_background"]["beyond_mib"] < share + 64


def test_recorded_kills_and_damage_are_not_silent_in_anyrank(module: Import) -> None:
    found, kills = result("kills"), module("kills")
    assert [row["event"] for row in found["rows"]] == list(kills.EVENTS)
    rows = {row["event"]: row["cells"] for row in found["rows"]}
    for way in ("anyrank", "anyrank_background"):
        said = {event: cells[way]["verdict"] for event, cells in rows.items()}
        assert {said[event] for event in ("rank1", "rank0", "all")} <= {"v1", "v2"}
        assert {said[event] for event in kills.DAMAGES} == {"v1, told"}
    for event in ("rank1", "rank0", "all"):
        assert len(rows[event]["anyrank"]["instants"]) >= 5
    assert rows["rank1"]["dcp"]["verdict"].startswith("SILENT")
    assert sum(cell["verdict"].startswith("SILENT") for cell in rows["bit"].values()) >= 5


def test_verdicts_of_kills(module: Import) -> None:
    kills = module("kills")

    def rank(v1: int = 0, v2: int = 0, neither: int = 0, told: bool = False) -> dict[str, Any]:
        return {"versions": {"v1": v1, "v2": v2, "neither": neither}, "told": told}

    assert kills.verdict([rank(v2=3), rank(v2=3)]) == "v2"
    assert kills.verdict([rank(v1=3), rank(v1=3)]) == "v1"
    assert kills.verdict([rank(v1=3, told=True)] * 2) == "v1, told"
    assert kills.verdict([rank(v1=3), rank(v2=3)]) == "SILENT: v1 and v2 mixed"
    assert kills.verdict([rank(v2=2, neither=1), rank(v2=3)]) == "SILENT: wrong values"
    raised = {"error": "Traceback", "class": "LoadError"}
    assert kills.verdict([raised, {"end": "hangs"}]) == "error (LoadError)"
    assert kills.verdict([{"end": "hangs"}] * 2) == "error (hangs)"
    worst = ["v2", "v1, told", "v1", "error (LoadError)", "SILENT: wrong values"]
    assert [kills.severity(said) for said in worst] == [1, 2, 3, 4, 5]


def test_page_holds_the_figures_of_the_results(module: Import) -> None:
    page_of = module("tables")
    page = page_of.PAGE.read_text(encoding="utf-8")
    assert page_of.filled(page) == page, "run `python benchmarks/tables.py`"


def test_page_without_a_marker_is_refused(module: Import) -> None:
    with pytest.raises(ValueError, match="end of load"):
        module("tables").filled("<!-- load: made by benchmarks/tables.py -->")


def test_the_sweep_accounts_for_each_model_and_none_differs() -> None:
    found = result("sweep")
    outcomes = found["outcomes"]
    others = {name: sum(map(len, found["others"].get(name, {}).values())) for name in outcomes}
    assert outcomes == others | {"equal": len(found["equal"])}
    assert sum(outcomes.values()) == found["cases"]
    assert outcomes["differs"] == outcomes["died"] == 0
    assert outcomes["equal"] == len(found["equal"]) > 0.7 * found["cases"]
    assert all(reason for reasons in found["others"].values() for reason in reasons)


def test_the_sweep_notices_a_bit_and_a_tie(module: Import) -> None:
    sweep = module("sweep_models")
    one, other = (nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}) for _ in range(2))
    other.load_state_dict(one.state_dict())
    assert sweep.differences(one, other) == []
    with torch.no_grad():
        other["a"].bias.copy_(-one["a"].bias)
    assert sweep.differences(one, other) == ["a.bias"]
    with torch.no_grad():
        other["a"].bias.copy_(one["a"].bias)
        one["a"].weight.copy_(one["b"].weight)
    one["a"].weight, other["a"].weight = one["b"].weight, nn.Parameter(one["b"].weight.clone())
    assert sweep.differences(one, other) == ["ties of a.weight, b.weight"]


def test_recorded_hangs_are_named_in_time_and_an_uneven_job_is_left_alone() -> None:
    found = result("watch")
    rows = found["watched"]
    assert len(rows) == 12
    assert sum(row["is_right"] for row in rows.values()) >= 11
    assert max(row["late_sec"] for row in rows.values()) <= 10
    assert (found["uneven"]["alarms"], found["uneven"]["has_ended"]) == (0, True)
    assert found["cost"]["cpu_share"]["most"] <= 0.005
