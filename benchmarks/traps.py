"""Traps of loading: which way falls into which. No cell of anyrank's column may be SILENT.

    python benchmarks/traps.py               # every row and way; results/traps.json
    python benchmarks/traps.py --rows rotary tied --ways anyrank

Every cell runs on two fresh ranks. Memory that nobody has written to is filled with NaN first, so
that no luck makes a wrong value right.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bench
import torch
import torch.distributed.checkpoint as dcp
from bench import Case, Run
from launch import Launcher, Outcome, Table, settle
from models import sharded
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from trap_files import FILES, INDEX, reference, write_folder

import anyrank

RANKS = 2
MAX_TEXT = 400
WAYS = {
    "anyrank": "anyrank.load",
    "strict": "load_state_dict",
    "loose": "load_state_dict(strict=False)",
    "dcp": "DCP, HuggingFaceStorageReader",
    "dcp_partial": "DCP, partial loads allowed",
}


@dataclass(frozen=True)
class Row:
    """One trap.

    Attributes:
        title: in the table.
        files: what is wrong with the source; a name of FILES.
        model: what is loaded into; a name of MODELS.
        verify: anyrank is asked to verify; the others have nothing to ask for.
    """

    title: str
    files: str = "good"
    model: str = "sharded"
    verify: bool = False


ROWS = {
    "rotary": Row("non-persistent buffer (rotary inv_freq) on meta", model="all_meta"),
    "tied": Row("tied embeddings, head not in the file", "tied", "tied"),
    "missing": Row("key missing in the checkpoint", "missing"),
    "index": Row("index names a shard that is not there", "no_shard"),
    "leftover": Row("leftover .safetensors not in the index", "leftover"),
    "truncated": Row("truncated shard", "truncated"),
    "half": Row("shape: half the rows", "half"),
    "transposed": Row("shape: transposed", "transposed"),
    "more": Row("shape: more rows", "more"),
    "bit": Row("one flipped bit, the file came with a checksum", "bit_hub", verify=True),
    "bit_zip": Row("one flipped bit in a torch file", "bit_zip", verify=True),
    "bit_bare": Row("one flipped bit, no checksum anywhere", "bit", verify=True),
    "nan": Row("a tensor of NaN, the file came with a checksum", "nan_hub", verify=True),
    "nan_bare": Row("a tensor of NaN, no checksum anywhere", "nan", verify=True),
    "ddp": Row("model in DDP", model="ddp"),
    "compile": Row("model compiled", model="compile"),
    "ddp_compile": Row("DDP of compiled", model="ddp_compile"),
    "compile_ddp": Row("compiled DDP", model="compile_ddp"),
    "module": Row("a `module.` checkpoint into a bare model", "module", "plain"),
    "meta": Row("model left on meta", model="plain_meta"),
    "lora": Row("base checkpoint into a LoRA model on meta", model="lora"),
    "lora_base": Row("the same into its get_base_model()", model="lora_base"),
    "pickle": Row("a pickle that runs code, as a torch file", "pickle", "plain"),
    "metadata": Row("a pickle that runs code, as DCP's .metadata", "metadata", "plain"),
}


# -- models ---------------------------------------------------------------------------------------


def skeleton(tied: bool = False) -> Any:
    """The model on meta, its buffers real."""
    with anyrank.meta():
        return reference(tied)


def all_meta() -> Any:
    """As a user does without anyrank: buffers are on meta as well."""
    with torch.device("meta"):
        return reference()


def shard(model: Any) -> Any:
    """Over all ranks; what is tied stays in one unit."""
    return sharded(model, model.model.layers)


def wrapped(*steps: Callable[[Any], Any]) -> Any:
    """Plain, real, full of NaN, and wrapped."""
    model = poisoned(reference())
    for step in steps:
        model = step(model)
    return model


def lora() -> Any:
    """PEFT on a model on meta."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return get_peft_model(skeleton(), config)


MODELS: dict[str, Callable[[], Any]] = {
    "sharded": lambda: shard(skeleton()),
    "all_meta": lambda: shard(all_meta()),
    "tied": lambda: shard(skeleton(tied=True)),
    "plain": wrapped,
    "plain_meta": skeleton,
    "ddp": partial(wrapped, DistributedDataParallel),
    "compile": partial(wrapped, torch.compile),
    "ddp_compile": partial(wrapped, torch.compile, DistributedDataParallel),
    "compile_ddp": partial(wrapped, DistributedDataParallel, torch.compile),
    "lora": lora,
    "lora_base": lora,
}


def poisoned(model: Any) -> Any:
    """The model with NaN in all of its memory, buffers that were real before left out."""
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(float("nan"))
    return model


def given_memory(model: Any) -> Any:
    """What a user of `to_empty` gets, made visible: NaN in all that was on meta."""
    if not any(one.is_meta for one in (*model.parameters(), *model.buffers())):
        return model
    real = {name: one.clone() for name, one in model.named_buffers() if not one.is_meta}
    model.to_empty(device="cpu")
    for name, one in model.named_buffers():
        one.copy_(real[name]) if name in real else one.fill_(float("nan"))
    return poisoned(model)


# -- ways -----------------------------------------------------------------------------------------


def load(way: str, row: Row, model: Any, source: str) -> None:
    """Load the source into the model."""
    target = model.get_base_model() if row.model == "lora_base" else model
    if way == "anyrank":
        anyrank.load(target, source, verify=row.verify)
        return
    if row.model != "plain_meta":
        given_memory(model)
    if way in ("strict", "loose"):
        state = {key: sharded_like(target, key, one) for key, one in read_all(source).items()}
        target.load_state_dict(state, strict=way == "strict")
        return
    state = dict(target.state_dict())
    planner = DefaultLoadPlanner(allow_partial_load=way == "dcp_partial")
    if row.files == "metadata":
        dcp.load(state, checkpoint_id=source, planner=planner)
    elif os.path.isfile(source):
        raise NotImplementedError("DCP has no reader of torch files")
    else:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(source), planner=planner)
    if any(isinstance(one, torch.Tensor) and one.is_meta for one in state.values()):
        target.load_state_dict(state)


def sharded_like(model: Any, key: str, value: Any) -> Any:
    """A full tensor as the model's parameter is sharded; without one, as it is."""
    known = dict(model.named_parameters(remove_duplicate=False)).get(key)
    if known is None or not hasattr(known, "placements"):
        return value
    return distribute_tensor(value, known.device_mesh, known.placements, src_data_rank=None)


def read_all(source: str) -> dict[str, Any]:
    """Every tensor, as a script reads them: the index's files, or one torch file."""
    if os.path.isfile(source):
        return torch.load(source, map_location="cpu")
    index = Path(source, INDEX)
    if not index.exists():
        raise NotImplementedError("no safetensors in the folder")
    files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    state: dict[str, Any] = {}
    for file in sorted(set(files)):
        state |= load_file(os.path.join(source, file))
    return state


# -- the verdict ----------------------------------------------------------------------------------


class Heard(logging.Handler):
    """Warnings that a user sees, by any channel."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text."""
        self.texts.append(record.getMessage())


def run(name: str, way: str, source: str) -> Table:
    """The job of one rank: what it loaded, or its error."""
    row, heard = ROWS[name], Heard()
    logging.getLogger().addHandler(heard)
    warnings.simplefilter("ignore")
    model = MODELS[row.model]()
    settle()
    found: Table = {"class": "", "text": "", "wrong": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            load(way, row, model, source)
            found["wrong"] = wrong(model, row)
        except BaseException as problem:  # DCP's errors are no Exceptions
            found |= {"class": type(problem).__name__, "text": str(problem)}
    heard.texts += [str(one.message) for one in caught]
    ran = os.path.exists(os.path.join(os.path.dirname(source), "ran-code"))
    return found | {"heard": heard.texts, "ran_code": ran}


def wrong(model: Any, row: Row) -> list[str]:
    """Names of tensors that do not have their right values."""
    right = reference(row.model == "tied")
    expected = {**dict(right.named_parameters()), **dict(right.named_buffers())}
    tied = expected["model.embed_tokens.weight"]
    found: list[str] = []
    seen: set[str] = set()
    for raw, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        name = plain_name(raw)
        seen.add(name)
        if value.is_meta:
            is_right = False
        elif "lora_" in name:
            is_right = bool(value.isfinite().all()) and bool(value.any()) != ("lora_B" in name)
        else:
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            is_right = torch.equal(whole.detach(), expected.get(name, tied).detach())
        found += [] if is_right else [raw]
    if row.model == "tied" and model.lm_head.weight is not model.model.embed_tokens.weight:
        found.append("lm_head.weight is not tied")
    return sorted([*found, *(expected.keys() - seen)])


def plain_name(name: str) -> str:
    """A tensor's name without its wrappers'."""
    parts = name.replace("base_model.model.", "").split(".")
    return ".".join(part for part in parts if part not in ("module", "_orig_mod", "base_layer"))


def verdict(tables: list[Table], row: Row) -> str:
    """right, error (class), told (wrong, but a warning says so), or SILENT."""
    if any(table["ran_code"] for table in tables):
        return "SILENT: ran code"
    classes = sorted({table["class"] for table in tables})
    if "NotImplementedError" in classes:
        return "-"
    if any(classes):
        return f"error ({', '.join(one or 'none on the others' for one in reversed(classes))})"
    if not any(table["wrong"] for table in tables):
        return "right"
    heard = [text for table in tables for text in table["heard"]]
    if any(tells(text, row) for text in heard):
        return "told"
    count = max(len(table["wrong"]) for table in tables)
    return f"SILENT: {count} wrong" + (", warns" if heard else "")


def tells(text: str, row: Row) -> bool:
    """Whether a warning says that nothing could be compared, or what is not finite."""
    return row.verify and ("no checksums" in text or "not finite" in text)


def cell_of(outcome: Outcome, row: Row) -> dict[str, Any]:
    """A cell: the verdict, and the first rank's words."""
    if error := outcome.error:
        last = error.strip().splitlines()[-1]
        return {"verdict": "error (hang)" if error.endswith("hangs") else "broken", "text": last}
    tables = [table["value"] for table in outcome.stages[0]]
    told = next((table["text"] for table in tables if table["text"]), "")
    told = told.strip().splitlines()[-1] if "Traceback" in told else told
    heard = next((text for table in tables for text in table["heard"]), "")
    return {"verdict": verdict(tables, row), "text": (told or heard)[:MAX_TEXT]}


def measure(options: argparse.Namespace, launcher: Launcher) -> Run:
    """The table: each row in every way."""
    warnings.simplefilter("ignore")
    rows: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.rows:

            def once(way: str, number: int, name: str = name) -> Run:
                row = ROWS[name]
                source = write_folder(Path(folder, f"{name}-{way}"), FILES[row.files])
                outcome = launcher.run(RANKS, run, name, way, str(source), timeout_sec=120)
                cell = cell_of(outcome, row)
                return cell | {"text": cell["text"].replace(folder, "FOLDER")}

            cells = Case(name, options.ways, once).once()
            rows.append({"row": name, "title": ROWS[name].title, "cells": cells})
    result: Run = {"ways": {way: WAYS[way] for way in options.ways}, "rows": rows}
    return result | {"goals": goals_of(result)}


def goals_of(result: Run) -> list[Run]:
    """What anyrank is to reach, and what it did."""
    cells = [row["cells"] for row in result["rows"]]
    ours = [row["anyrank"]["verdict"] for row in cells if "anyrank" in row]
    silent = [said for said in ours if said.startswith(("SILENT", "broken", "-"))]
    broken = sum(cell["verdict"] == "broken" for row in cells for cell in row.values())
    return [
        bench.goal("traps that anyrank is silent in", len(silent), 0),
        bench.goal("traps that were left out", len(ROWS) - len(ours), 0),
        bench.goal("cells that are broken", broken, 0),
    ]


if __name__ == "__main__":
    choices: Run = {"rows": [*ROWS], "ways": [*WAYS]}
    small: Run = {"rows": ["rotary", "bit", "pickle"], "ways": ["anyrank", "strict"]}
    bench.main("traps", measure, small, [*choices], **choices)
