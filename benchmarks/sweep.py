"""Every model of transformers that can be built small, loaded by anyrank and by from_pretrained.

    python benchmarks/sweep.py                    # results/sweep.json
    python benchmarks/sweep.py --sample 100       # 100 of them, drawn with --seed
    python benchmarks/sweep.py --only llama llava # these model types, and nothing is written

For each type of config: its base model, and its first model with a head. The default config is
made small by the names of its fields, the model filled with random values and saved with
`save_pretrained`. Parameters, buffers and ties of `anyrank.load`, into a model on meta and into a
real one, are compared bit for bit with `from_pretrained`. What is done is kept in --state, so that
a second call goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench
from bench import Run
from sweep_models import Pair, all_pairs, check_pair

CASE_SEC = 120  # after which a pair is given up
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


def measure(options: argparse.Namespace) -> Run:
    """The outcome of each pair; those that are not equal are printed."""
    every = all_pairs()
    pairs = random.Random(options.seed).sample(every, len(every))[: options.sample or None]
    state = Path(options.state or Path(tempfile.gettempdir()) / "anyrank-sweep.jsonl")
    if options.only:
        pairs = [pair for pair in every if pair.model_type in options.only]
        state = state.with_name(f"{state.name}.{os.getpid()}")
    done = finish(pairs, state, options.processes)
    rows: dict[str, list[Run]] = {
        outcome: [done[pair] for pair in pairs if done[pair]["outcome"] == outcome]
        for outcome in TITLES
    }
    for outcome, title in TITLES.items():
        print(f"{len(rows[outcome]):5} {outcome:18} {title}")
    for outcome in ("refused", "differs", "reference differs", "died"):
        for row in rows[outcome]:
            print(f"  {named(row)}: {outcome}: {row['detail']}")
    if options.only:
        return {}
    result: Run = {
        "cases": len(pairs),
        "of": len(every),
        "seed": options.seed,
        "outcomes": {outcome: len(same) for outcome, same in rows.items()},
        "others": {o: by_reason(same) for o, same in rows.items() if same and o != "equal"},
    }
    return result | {"goals": goals_of(result)}


def goals_of(result: Run) -> list[Run]:
    """What anyrank is to reach, and what it did."""
    outcomes, cases = result["outcomes"], result["cases"]
    return [
        bench.goal("models that differ", outcomes["differs"] + outcomes["died"], 0),
        bench.goal("models that nothing is said of", cases - sum(outcomes.values()), 0),
        bench.goal("models that are not loaded / all", 1 - outcomes["equal"] / cases, 0.3),
    ]


def named(row: Run) -> str:
    """A model's class, and the type of its config."""
    return f"{row['kind']} ({row['model_type']})"


def by_reason(rows: list[Run]) -> dict[str, list[str]]:
    """Reason -> models."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row["detail"][:DETAIL], []).append(named(row))
    return reasons


def finish(pairs: list[Pair], state: Path, number: int) -> dict[Pair, Run]:
    """Run what the state does not hold yet; a pair that ended its process counts as done."""
    start = time.monotonic()
    while todo := [pair for pair in pairs if pair not in read_state(state)]:
        done, seconds = len(pairs) - len(todo), time.monotonic() - start
        print(f"{done} of {len(pairs)} after {seconds:.0f} s", flush=True)
        workers = [spawn(state, todo[n::number]) for n in range(number)]
        for worker in workers:
            worker.wait()
    return read_state(state)


def spawn(state: Path, pairs: list[Pair]) -> subprocess.Popen[str]:
    """A process that checks pairs until one of them ends it."""
    command = [sys.executable, __file__, "work", str(state)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
    assert worker.stdin is not None
    json.dump(pairs, worker.stdin)
    worker.stdin.close()
    return worker


def work(state: Path, pairs: list[Pair]) -> None:
    """Check pairs one after the other; each is written down before it begins, and when it ends."""
    with state.open("a", buffering=1, encoding="utf-8") as file:
        for pair in pairs:
            row = pair._asdict()
            file.write(json.dumps({**row, "outcome": "died", "detail": ""}) + "\n")
            signal.alarm(CASE_SEC)  # ends the process
            outcome, detail = check_pair(pair)
            signal.alarm(0)
            file.write(json.dumps({**row, "outcome": outcome, "detail": detail}) + "\n")


def read_state(state: Path) -> dict[Pair, Run]:
    """What is done."""
    lines = state.read_text(encoding="utf-8").splitlines() if state.exists() else []
    rows: list[Run] = [json.loads(line) for line in lines]
    return {Pair(row["model_type"], row["kind"]): row for row in rows}


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(Path(sys.argv[2]), [Pair(*pair) for pair in json.load(sys.stdin)])
    else:
        options: Run = {"sample": 0, "seed": 0, "only": [], "processes": 2, "state": None}
        bench.main("sweep", measure, {"only": ["llama", "gpt2"]}, **options)
