"""`ElasticLoader.from_iterable` with Hugging Face's IterableDataset, on parquet and JSON lines."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anyrank

datasets: Any = pytest.importorskip("datasets", minversion="5.0")

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

BATCH = {"batched": True, "batch_size": 6}
SIZES = (25, 35, 45)
IDS = sorted(1000 * number + row for number, size in enumerate(SIZES) for row in range(size))


def write(kind: str, folder: Path) -> list[str]:
    paths: list[str] = []
    for number, size in enumerate(SIZES):
        rows = [{"n": 1000 * number + row, "text": f"{number}-{row}"} for row in range(size)]
        path = folder / f"{number}.{kind}"
        if kind == "parquet":
            parquet: Any = pytest.importorskip("pyarrow.parquet")
            arrow: Any = pytest.importorskip("pyarrow")
            parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=10)
        else:
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        paths.append(str(path))
    return paths


def open_stream(kind: str, paths: list[str]) -> Any:
    loader = "parquet" if kind == "parquet" else "json"
    return datasets.load_dataset(loader, data_files=paths, streaming=True, split="train")


def run(loader: anyrank.ElasticLoader, stop: int = 10**9) -> list[Any]:
    """The batches of an epoch, or up to a step."""
    batches: list[Any] = []
    for step in loader:
        batches += step.microbatches(nn.Linear(1, 1))
        loader.commit()
        if loader.step >= stop:
            break
    return batches


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("chain", ["plain", "mapped", "drawn", "torch"])
def test_a_stream_is_read_once_through_resumes(
    kind: str, chain: str, num_workers: int, tmp_path: Path
) -> None:
    paths = write(kind, tmp_path)
    assert anyrank.row_counts(paths, kept_in=tmp_path / "rows.json") == list(SIZES)

    def make() -> anyrank.ElasticLoader:
        stream = open_stream(kind, paths)
        if chain == "mapped":
            stream = stream.map(lambda row: {"twice": 2 * row["n"]})
            stream = stream.filter(lambda row: row["n"] % 2 == 0)
        if chain == "drawn":  # in batches, which are computed when the first row is asked for
            stream = stream.map(lambda rows: {"x": [random.random() for _ in rows["n"]]}, **BATCH)
            stream = stream.filter(lambda row: random.random() < 2)
        if chain == "torch":
            stream = stream.with_format("torch")
        return anyrank.ElasticLoader.from_iterable(
            stream, global_batch=12, microbatch=3, collate_fn=list, num_workers=num_workers
        )

    whole = make()
    expected = run(whole)
    rows = [row for batch in expected for row in batch]
    ids = IDS if chain != "mapped" else [n for n in IDS if n % 2 == 0]
    assert sorted(int(row["n"]) for row in rows) == ids
    assert whole.receipts[0].verdict.startswith(f"exactly once, {len(ids)} rows")
    if chain == "torch":
        assert isinstance(rows[0]["n"], torch.Tensor)
    loader, seen = make(), list[Any]()
    for stop in (1, 2, 4):  # several resumes in a row
        seen += run(loader, stop)
        state = json.loads(json.dumps(loader.state_dict()))
        loader = make()
        loader.load_state_dict(state)
    assert str(seen + run(loader)) == str(expected)


def test_streams_that_mix_or_divide_their_rows_are_refused(tmp_path: Path) -> None:
    from datasets.distributed import split_dataset_by_node

    stream = open_stream("jsonl", write("jsonl", tmp_path))
    for other, text in (
        (stream.shuffle(seed=1, buffer_size=100), "mixes its shards while it reads them"),
        (split_dataset_by_node(stream, 0, 2), "divided it among the ranks already"),
    ):
        with pytest.raises(ValueError, match=text):
            anyrank.ElasticLoader.from_iterable(other, global_batch=12, microbatch=3)
