"""`ElasticLoader.from_iterable` with Hugging Face's IterableDataset, on parquet and JSON lines."""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anyrank

# Where `make` installs it, apart from all others: transformers imports it where it is installed.
PACKAGES = Path(sys.prefix) / "datasets"

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def datasets(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package."""
    if PACKAGES.is_dir():
        monkeypatch.syspath_prepend(str(PACKAGES))
    return pytest.importorskip("datasets", minversion="5.0")


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
    datasets: Any = importlib.import_module("datasets")
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
    assert whole.receipts[0].verdict.startswith(f"each row read was used once: {len(ids)}")
    if chain == "torch":
        assert isinstance(rows[0]["n"], torch.Tensor)
    loader, seen = make(), list[Any]()
    for stop in (1, 2, 4):  # several resumes in a row
        seen += run(loader, stop)
        state = json.loads(json.dumps(loader.state_dict()))
        loader = make()
        loader.load_state_dict(state)
    assert str(seen + run(loader)) == str(expected)


WHOLE: dict[str, Any] = {
    "take(50)": lambda s: s.take(50),
    "skip(20)": lambda s: s.skip(20),
    "take(30)": lambda s: s.skip(20).take(30),
    "map(with_indices=True)": lambda s: s.map(lambda row, i: {"i": i}, with_indices=True),
    "filter(with_indices=True)": lambda s: s.filter(lambda row, i: i % 3 == 0, with_indices=True),
    "a batched map(drop_last_batch=True)": lambda s: s.map(
        lambda rows: rows, batched=True, batch_size=10, drop_last_batch=True
    ),
    "batch()": lambda s: s.batch(2),
    "add_column()": lambda s: s.add_column("i", [*range(200)]),
}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("step", WHOLE)
def test_what_counts_rows_over_the_whole_stream_is_read_as_one_shard(
    step: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And has the rows that `datasets` gives in one process, through a resume."""
    stream = WHOLE[step](open_stream(kind, write(kind, tmp_path)))

    def make() -> anyrank.ElasticLoader:
        return anyrank.ElasticLoader.from_iterable(
            stream, global_batch=12, microbatch=3, collate_fn=list
        )

    expected = [str(row) for row in stream]
    loader = make()
    assert f"{step} counts rows over the whole stream" in caplog.text
    seen = run(loader, 1)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    seen += run(resumed)
    assert sorted(str(row) for batch in seen for row in batch) == sorted(expected)
    assert f"{step} counts rows over the whole stream" in resumed.notes[-1]


BY_ROW: dict[str, Any] = {
    "select_columns": lambda s: s.select_columns(["n"]),
    "remove_columns": lambda s: s.remove_columns("text"),
    "rename_column": lambda s: s.rename_column("text", "t"),
    "rename_columns": lambda s: s.rename_columns({"text": "t"}),
    "cast_column": lambda s: s.cast_column("n", value("float32")),
    "cast": lambda s: s.cast(type(s.features)(s.features | {"n": value("int32")})),
    "decode": lambda s: s.decode(False),
    "map(remove_columns=)": lambda s: s.map(lambda row: {"m": row["n"]}, remove_columns=["n"]),
    "map(input_columns=)": lambda s: s.map(lambda n: {"m": n}, input_columns="n"),
    "map in batches": lambda s: s.map(lambda rows: rows, batched=True),
    "map in arrow": lambda s: s.with_format("arrow").map(lambda t: t, batched=True, batch_size=4),
    "filter in batches": lambda s: s.filter(lambda rows: [True] * len(rows["n"]), batched=True),
    "repeat": lambda s: s.repeat(2),
    "several": lambda s: s.rename_column("n", "m").filter(lambda r: r["m"] % 2).remove_columns("m"),
}


def value(dtype: str) -> Any:
    datasets: Any = importlib.import_module("datasets")
    return datasets.Value(dtype)


def texts_of(rows: Any) -> list[str]:
    return sorted(f"{type(row)} {row}" for row in rows)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("step", BY_ROW)
def test_what_treats_each_row_alone_is_done_by_shard(
    step: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = write(kind, tmp_path)
    stream = open_stream(kind, paths)
    if stream.features is None:
        stream = stream.cast(
            importlib.import_module("datasets")
            .load_dataset(
                "json", data_files=paths, split="train", cache_dir=str(tmp_path / "cache")
            )
            .features
        )
    stream = BY_ROW[step](stream)
    loader = anyrank.ElasticLoader.from_iterable(
        stream, global_batch=12, microbatch=3, collate_fn=list
    )
    rows = [row for batch in run(loader) for row in batch]
    assert texts_of(rows) == texts_of(stream)
    assert f"in {12 if kind == 'parquet' else 3} shards" in loader.receipts[0].verdict
    assert not loader.notes
    assert "whole stream" not in caplog.text


@pytest.mark.parametrize("form", [None, "python", "torch", "numpy", "arrow", "pandas"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_have_the_types_that_the_stream_gives(form: Any, num_workers: int) -> None:
    datasets: Any = importlib.import_module("datasets")
    columns = {"n": [*range(9)], "f": [0.5] * 9, "text": ["a"] * 9, "v": [[1, 2]] * 9}
    stream = datasets.Dataset.from_dict(columns).to_iterable_dataset(3).with_format(form)
    loader = anyrank.ElasticLoader.from_iterable(
        stream, global_batch=4, microbatch=2, collate_fn=list, num_workers=num_workers
    )

    def described(row: Any) -> str:
        if not isinstance(row, dict):
            return f"{type(row)} {row.shape} {row}"
        return str([(k, type(v), getattr(v, "dtype", None), str(v)) for k, v in row.items()])

    rows = [row for batch in run(loader) for row in batch]
    assert sorted(map(described, rows)) == sorted(map(described, stream))


def test_streams_that_mix_or_divide_their_rows_are_refused(tmp_path: Path, datasets: Any) -> None:
    from datasets.distributed import split_dataset_by_node

    stream = open_stream("jsonl", write("jsonl", tmp_path))
    for other, text in (
        (stream.shuffle(seed=1, buffer_size=100), "keeps rows in a buffer"),
        (stream.take(20).shuffle(seed=1), "keeps rows in a buffer"),
        (stream.shuffle(seed=1, max_buffer_input_shards=1), "keeps rows in a buffer"),
        (datasets.interleave_datasets([stream, stream]), r"Pass the datasets by name.*mix="),
        (split_dataset_by_node(stream, 0, 2), "already divided it among the ranks"),
        (split_dataset_by_node(stream, 0, 3), "already divided it among the ranks"),
        (stream.repeat(None), r"never be read\. .* pass endless=True"),
    ):
        with pytest.raises(ValueError, match=text):
            anyrank.ElasticLoader.from_iterable(other, global_batch=12, microbatch=3)


def test_an_endless_repeat_is_read_where_all_of_its_shards_are(tmp_path: Path) -> None:
    stream = open_stream("jsonl", write("jsonl", tmp_path))
    for repeated, endless in ((stream.repeat(None), True), (stream.repeat(None).take(200), False)):
        loader = anyrank.ElasticLoader.from_iterable(
            repeated, endless=endless, global_batch=4, microbatch=2, collate_fn=list
        )
        batches = run(loader, 80 if endless else 10**9)
        assert {row["n"] for batch in batches for row in batch} == {*IDS}


def test_the_number_of_rows_is_compared_with_what_the_dataset_knows(tmp_path: Path) -> None:
    from datasets import SplitDict, SplitInfo

    stream = open_stream("parquet", write("parquet", tmp_path))
    for known, text in ((105, "exactly once: 105 of 105 rows"), (200, "not all rows: 105 of 200")):
        stream.info.splits = SplitDict({"train": SplitInfo("train", num_examples=known)})
        loader = anyrank.ElasticLoader.from_iterable(
            stream, global_batch=12, microbatch=3, collate_fn=list
        )
        run(loader)
        assert loader.receipts[0].verdict.startswith(text)


def test_the_program_of_the_page_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs/streams.md").read_text(encoding="utf-8")
    section = page.split("## Hugging Face's streams")[1]
    program = section.split("```python\n")[1].split("```")[0]
    write("jsonl", tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "docs/streams.md", "exec"), {})  # noqa: S102 - the page's own
    assert capsys.readouterr().out == section.split("```text\n")[1].split("```")[0]


def test_a_packed_model_of_transformers_looks_at_one_document_alone() -> None:
    """As docs/streams.md says: position_ids are enough, without an attention_mask and a cache."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=32, **sizes, **heads)).eval()
    pack = anyrank.Pack(8)
    (row,) = [*pack.feed({"input_ids": [5, 6, 7]}), *pack.feed({"input_ids": [1, 2, 3, 4, 9]})]
    inputs = {name: row[name][None] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        alone = model(input_ids=inputs["input_ids"][:, 3:]).logits
        packed = model(**inputs, use_cache=False).logits[:, 3:]
        cached = model(**inputs, use_cache=True).logits[:, 3:]
    torch.testing.assert_close(packed, alone)
    assert not torch.allclose(cached, alone, atol=1e-4)
