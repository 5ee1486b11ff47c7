"""Traps of loading: which way falls into which. No cell of anyrank's column may be SILENT.

    python benchmarks/traps.py               # every row and way; results/traps.json
    python benchmarks/traps.py --rows rotary,tied --ways anyrank

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import keep
from launch import Launcher, settle
from machine import describe_machine
from trap_files import FILES, reference, write_folder

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


def sharded(size: int) -> Any:
    """On meta with real buffers, then FSDP2."""
    return shard(skeleton(size), size)


def skeleton(size: int, tied: bool = False) -> Any:
    """The model on meta, its buffers real."""
    import anyrank

    with anyrank.meta():
        return reference(tied)


def shard(model: Any, size: int) -> Any:
    """`fully_shard` over all ranks; what is tied stays in one unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def all_meta(size: int) -> Any:
    """As a user does without anyrank: buffers are on meta as well."""
    import torch

    with torch.device("meta"):
        model = reference()
    return shard(model, size)


def real(size: int) -> Any:
    """Plain, real, and full of NaN."""
    return poisoned(reference())


def wrapped(*steps: str) -> Callable[[int], Any]:
    """Plain, real, and wrapped."""

    def make(size: int) -> Any:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        model = real(size)
        for step in steps:
            model = DistributedDataParallel(model) if step == "ddp" else torch.compile(model)
        return model

    return make


def lora(size: int) -> Any:
    """PEFT on a model on meta."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return get_peft_model(skeleton(size), config)


MODELS: dict[str, Callable[[int], Any]] = {
    "sharded": sharded,
    "all_meta": all_meta,
    "tied": lambda size: shard(skeleton(size, tied=True), size),
    "plain": real,
    "plain_meta": skeleton,
    "ddp": wrapped("ddp"),
    "compile": wrapped("compile"),
    "ddp_compile": wrapped("compile", "ddp"),
    "compile_ddp": wrapped("ddp", "compile"),
    "lora": lora,
    "lora_base": lora,
}


def poisoned(model: Any) -> Any:
    """The model with NaN in all of its memory, buffers that were real before left out."""
    import torch

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
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    import anyrank

    target = model.get_base_model() if row.model == "lora_base" else model
    if way == "anyrank":
        anyrank.load(target, source, verify=row.verify)
        return
    if row.model != "plain_meta":
        given_memory(model)
    if way in ("strict", "loose"):
        strict = way == "strict"
        state = read_all(source)
        if row.model in ("sharded", "all_meta", "tied"):
            state = {key: sharded_like(target, key, value) for key, value in state.items()}
        target.load_state_dict(state, strict=strict)
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
    from torch.distributed.tensor import distribute_tensor

    known = dict(model.named_parameters(remove_duplicate=False)).get(key)
    if known is None or not hasattr(known, "placements"):
        return value
    return distribute_tensor(value, known.device_mesh, known.placements, src_data_rank=None)


def read_all(source: str) -> dict[str, Any]:
    """Every tensor, as a script reads them: the index's files, or one torch file."""
    import torch
    from safetensors.torch import load_file

    if os.path.isfile(source):
        return torch.load(source, map_location="cpu")
    if not os.path.exists(os.path.join(source, "model.safetensors.index.json")):
        raise NotImplementedError("no safetensors in the folder")
    text = Path(source, "model.safetensors.index.json").read_text(encoding="utf-8")
    state: dict[str, Any] = {}
    for file in sorted(set(json.loads(text)["weight_map"].values())):
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


def run(rank: int, size: int, name: str, way: str, source: str) -> Iterator[dict[str, Any]]:
    """The job of one rank; see `Launcher.run`."""
    row, heard = ROWS[name], Heard()
    logging.getLogger().addHandler(heard)
    warnings.simplefilter("ignore")
    model = MODELS[row.model](size)
    settle()
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            load(way, row, model, source)
        except BaseException as problem:  # DCP's errors are no Exceptions
            error = problem
    heard.texts += [str(one.message) for one in caught]
    ran = os.path.exists(os.path.join(os.path.dirname(source), "ran-code"))
    yield {
        "class": "" if error is None else type(error).__name__,
        "text": "" if error is None else str(error),
        "wrong": [] if error is not None else wrong(model, row),
        "heard": heard.texts,
        "ran_code": ran,
    }


def wrong(model: Any, row: Row) -> list[str]:
    """Names of tensors that do not have their right values."""
    import torch

    right = reference(row.model == "tied")
    expected = {**dict(right.named_parameters()), **dict(right.named_buffers())}
    found: list[str] = []
    seen: set[str] = set()
    for kind in (model.named_parameters(remove_duplicate=False), model.named_buffers()):
        for raw, value in kind:
            name = plain_name(raw)
            if "lora_" in name:
                zero = not value.is_meta and not value.any()
                sound = not value.is_meta and bool(value.isfinite().all())
                if not sound or zero != ("lora_B" in name):
                    found.append(raw)
                continue
            seen.add(name)
            known = expected.get(name, expected.get("model.embed_tokens.weight"))
            if value.is_meta:
                found.append(raw)
                continue
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            if known is None or not torch.equal(whole.detach(), known.detach()):
                found.append(raw)
    if row.model == "tied" and model.lm_head.weight is not model.model.embed_tokens.weight:
        found.append("lm_head.weight is not tied")
    return sorted([*found, *(expected.keys() - seen)])


def plain_name(name: str) -> str:
    """A tensor's name without its wrappers'."""
    parts = name.replace("base_model.model.", "").split(".")
    return ".".join(part for part in parts if part not in ("module", "_orig_mod", "base_layer"))


def verdict(tables: list[dict[str, Any]], row: Row) -> str:
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


def main() -> None:
    """Fill the table, print and keep it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--out", help="file of the results; by default only of a whole run")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    names, ways = options.rows.split(","), options.ways.split(",")
    launcher = Launcher("preload")
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            row: dict[str, Any] = {"row": name, "title": ROWS[name].title, "cells": {}}
            for way in ways:
                source = write_folder(Path(folder, f"{name}-{way}"), FILES[ROWS[name].files])
                outcome = launcher.run(RANKS, run, name, way, str(source), timeout_sec=60)
                cell = cell_of(outcome.stages, outcome.error, ROWS[name])
                row["cells"][way] = json.loads(json.dumps(cell).replace(folder, "FOLDER"))
            cells.append(row)
            told = [f"{way}: {cell['verdict']}" for way, cell in row["cells"].items()]
            print(f"{name:12} " + "; ".join(told), flush=True)
    ours = {row["row"]: row["cells"].get("anyrank", {"verdict": ""})["verdict"] for row in cells}
    silent = [name for name, said in ours.items() if said.startswith(("SILENT", "broken"))]
    print(f"anyrank silent: {silent or 'nowhere'}")
    whole = names == list(ROWS) and ways == list(WAYS)
    if whole or options.out:
        keep("traps", describe_machine() | {"ways": WAYS, "rows": cells}, options.out)


def cell_of(stages: list[list[dict[str, Any]]], error: str, row: Row) -> dict[str, Any]:
    """A cell: the verdict, and the first rank's words."""
    if error:
        last = error.strip().splitlines()[-1]
        return {"verdict": "error (hang)" if "in time" in error else "broken", "text": last}
    told = next((table["text"] for table in stages[0] if table["text"]), "")
    told = told.strip().splitlines()[-1] if "Traceback" in told else told
    heard = next((text for table in stages[0] for text in table["heard"]), "")
    return {"verdict": verdict(stages[0], row), "text": (told or heard)[:MAX_TEXT]}


if __name__ == "__main__":
    main()
