"""Every model of transformers that can be built small, loaded by anyrank and by from_pretrained.

    python benchmarks/sweep.py                    # results/sweep.json
    python benchmarks/sweep.py --sample 100       # 100 of them, drawn with --seed
    python benchmarks/sweep.py --only llama,llava # these model types, with each outcome printed

For each type of config: its base model, and its first model with a head. The default config is
made small by the names of its fields, the model filled with random values and saved with
`save_pretrained`. Parameters, buffers and ties of `anyrank.load`, into a model on meta and into a
real one, are compared bit for bit with `from_pretrained`. What is done is kept in --state, so that
a second call goes on.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import keep
from machine import describe_machine
from sweep_models import Case, all_cases, check_case

CASE_SEC = 120  # after which a case is given up
DETAIL = 70  # characters of a reason that are kept
TITLES = {
    "equal": "equal in all bits, on meta and real",
    "not built": "the default config cannot be made, or made small, by the names of its fields",
    "too big": "too big, even made small",
    "no reference": "save_pretrained or from_pretrained raises",
    "reference differs": "anyrank gives what was saved, from_pretrained does not",
    "refused": "anyrank refuses",
    "differs": "anyrank gives other bits",
    "died": "the process ended, or took too long",
}


def main() -> None:
    options = parse_options()
    if options.worker is not None:
        work(options.state, [Case(*pair) for pair in json.load(sys.stdin)])
        return
    cases = chosen(all_cases(), options)
    done = finish(cases, options)
    outcomes = collections.Counter(done[case]["outcome"] for case in cases)
    for outcome, title in TITLES.items():
        print(f"{outcomes[outcome]:5} {outcome:18} {title}")
    for case in cases:
        if options.only or done[case]["outcome"] in (
            "refused",
            "differs",
            "reference differs",
            "died",
        ):
            print(
                f"  {case.kind} ({case.model_type}): {done[case]['outcome']}: "
                f"{done[case]['detail']}"
            )
    if options.only:
        return
    rows = {
        outcome: [done[c] for c in cases if done[c]["outcome"] == outcome] for outcome in TITLES
    }
    kept = {
        **describe_machine(),
        "cases": len(cases),
        "of": len(all_cases()),
        "seed": options.seed,
        "outcomes": {outcome: len(same) for outcome, same in rows.items()},
        "equal": [named(row) for row in rows["equal"]],
        "others": others(rows),
    }
    keep("sweep", kept)


def named(row: dict[str, str]) -> str:
    """A model's class, and the type of its config."""
    return f"{row['kind']} ({row['model_type']})"


def others(rows: dict[str, list[dict[str, str]]]) -> dict[str, dict[str, list[str]]]:
    """Outcome -> reason -> models, of those that are not equal."""
    by_outcome: dict[str, dict[str, list[str]]] = {}
    for outcome, same in rows.items():
        for row in same if outcome != "equal" else ():
            reasons = by_outcome.setdefault(outcome, {})
            reasons.setdefault(row["detail"][:DETAIL], []).append(named(row))
    return by_outcome


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sample", type=int, help="so many cases, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="model types, separated by commas")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--state", type=Path, default=Path(tempfile.gettempdir()) / "anyrank-sweep.jsonl"
    )
    parser.add_argument("--worker", action="store_true", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def chosen(cases: list[Case], options: argparse.Namespace) -> list[Case]:
    if options.only:
        options.state = options.state.with_name(f"{options.state.name}.{os.getpid()}")
        return [case for case in cases if case.model_type in options.only.split(",")]
    return random.Random(options.seed).sample(cases, len(cases))[: options.sample]


def finish(cases: list[Case], options: argparse.Namespace) -> dict[Case, dict[str, str]]:
    """Run what the state does not hold yet; a case that ended its process counts as done."""
    start, number = time.monotonic(), options.processes
    while todo := [case for case in cases if case not in read_state(options.state)]:
        print(
            f"{len(cases) - len(todo)} of {len(cases)} after {time.monotonic() - start:.0f} s",
            flush=True,
        )
        workers = [spawn(options.state, todo[n::number]) for n in range(number)]
        for worker in workers:
            worker.wait()
    return read_state(options.state)


def spawn(state: Path, cases: list[Case]) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--worker", "--state", str(state)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
    assert worker.stdin is not None
    json.dump(cases, worker.stdin)
    worker.stdin.close()
    return worker


def work(state: Path, cases: list[Case]) -> None:
    """Check cases one after the other; each is written down before it begins, and when it ends."""

    with state.open("a", buffering=1, encoding="utf-8") as file:
        for case in cases:
            row = {"model_type": case.model_type, "kind": case.kind}
            file.write(json.dumps({**row, "outcome": "died", "detail": ""}) + "\n")
            signal.alarm(CASE_SEC)  # ends the process
            outcome, detail = check_case(case)
            signal.alarm(0)
            file.write(json.dumps({**row, "outcome": outcome, "detail": detail}) + "\n")


def read_state(state: Path) -> dict[Case, dict[str, str]]:
    lines = state.read_text(encoding="utf-8").splitlines() if state.exists() else []
    rows: list[dict[str, str]] = [json.loads(line) for line in lines]
    return {Case(row["model_type"], row["kind"]): row for row in rows}


if __name__ == "__main__":
    main()
