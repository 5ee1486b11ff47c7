"""Questions that several calls ask have one function that answers, and here is who asks it.

load, resume, sync, convert, merge, verify, inspect and peft disagreed where each judged by itself:
one refused what another one took, in silence. A new caller asks the function, and is added here.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).parents[3] / "src" / "anyrank"


@dataclass(frozen=True)
class Question:
    """One question about a weight, a tensor or an adapter.

    Attributes:
        home: the module that answers it.
        answers: functions there, of which others use one or more.
        askers: modules that do.
        signs: what a module that judges by itself would look at, as a regex.
        allowed: modules beside the home that have such a sign for something else.
    """

    home: str
    answers: tuple[str, ...]
    askers: frozenset[str]
    signs: str
    allowed: frozenset[str] = frozenset()


QUESTIONS = {
    "Is this weight scaled?": Question(
        "models/dialects/transformers/quantized.py",
        ("scales_of", "pairs_of"),
        frozenset(
            {
                "models/dialects/transformers/dequantize.py",  # load, plan, diff, convert, inspect
                "tools/convert/selection.py",
            }
        ),
        r"absmax|zero_point|_scale_inv|\bSCB\b",
    ),
    "May small numbers be taken for weights?": Question(
        "models/dialects/transformers/dequantize.py",
        (
            *("without_scales", "unknown_method", "check_method", "dequantized"),
            *("packed_weights", "packed_in_words", "lone_numbers"),
        ),
        frozenset(
            {
                "models/dialects/transformers/values.py",  # load, sync, resume, convert, diff
                "loading/plan.py",
                "tools/convert/selection.py",
                "tools/convert/stored.py",
                "tools/inspect/inspect.py",
            }
        ),
        r"quant_method",
        frozenset({"models/dialects/transformers/quantized.py"}),  # the default size of blocks
    ),
    "How is a source quantized?": Question(
        "sources/readers/config_json.py",
        ("with_quantization", "read_quantization", "config_in"),
        frozenset(
            {
                "sources/source.py",  # files, and lists of them
                "sources/safetensors.py",
                "sources/readers/dcp.py",
                "sources/readers/huggingface.py",
                "sources/readers/torch_file.py",
            }
        ),
        r"text_config|\"quantization_config\"",
        frozenset({"tools/convert/copies.py"}),  # removed, where the weights are dequantized
    ),
    "How large are the blocks of FP8 that share a scale?": Question(
        "models/dialects/transformers/quantized.py",
        ("blocks_of",),
        frozenset({"models/dialects/transformers/dequantize.py"}),
        r"weight_block_size|BLOCK_SIZE",
        frozenset({"tools/inspect/diff.py"}),  # other sizes are other weights
    ),
    "In which memory do a tensor's values lie?": Question(
        "tensors/wrapped.py",
        ("values_of", "without_bytes", "stored_class", "is_wrapper", "rewrapped"),
        frozenset(
            {
                "tensors/sharded_tensor.py",  # whoever reads or writes a tensor of a model
                "models/dtensors.py",  # load, sync, convert, save, check: each tensor's layout
                "models/replace.py",
                "models/overlaps.py",
                "models/own_code.py",
                "models/dialects/frozen/freeze.py",
                "sources/readers/memory.py",
                "sources/readers/pickles.py",  # .pt and DCP: load, convert, verify, inspect
                "runs/state/part_types.py",
                "runs/state/optimizer_own.py",
            }
        ),
        r"__tensor_flatten__|is_quantized|Params4bit|ShardedTensor\b.*FSDP1",
        frozenset({"models/dtensors.py", "training/data/batches.py"}),
    ),
    "Is this tie one tensor?": Question(
        "models/overlaps.py",
        ("twins_of",),
        frozenset(
            {
                "models/match.py",  # load, resume from a file, sync
                "models/dialects/peft/merging.py",
            }
        ),
        r"tied_weights_keys",
        frozenset(
            {
                "models/dialects/transformers/conversions.py",  # a tie that to_empty() has broken
                "tools/convert/file_names.py",  # which name of a tie transformers keeps
            }
        ),
    ),
    "Does an adapter mean what the model means?": Question(
        "models/dialects/peft/adapters.py",
        ("other_settings", "settings_of"),
        frozenset({"models/dialects/peft/dialect.py", "integrations/peft.py"}),
        r"use_rslora|alpha_pattern",
    ),
    "By what does a model scale an adapter?": Question(
        "models/dialects/peft/merging.py",
        ("scaling_of", "other_scales", "scales_differ"),
        frozenset(
            {
                "live/ends.py",  # sync
                "live/match.py",
                "runs/state/modules.py",  # save and resume
                "models/dialects/peft/dialect.py",  # load and plan
                "integrations/peft.py",
            }
        ),
        r"\.scaling\b",
        frozenset({"live/ends.py", "live/match.py", "live/merge.py"}),  # their own rows
    ),
    "Does an adapter change one name of a tied tensor, is it plain LoRA, and enabled?": Question(
        "models/dialects/peft/merging.py",
        (
            "changes_one_name",
            "other_than_lora",
            "disabled",
            "find_lora",
            "merged_names",
            "as_merged",
        ),
        frozenset({"integrations/peft.py", "live/ends.py", "tools/convert/live.py"}),
        r"lora_variant|lora_bias\[|\.disable_adapters",
        frozenset({"models/dialects/peft/adapters.py"}),  # first values
    ),
    "Which tensors does no rule write?": Question(
        "models/first_values/buffers.py",
        ("without_rule",),
        frozenset({"models/match.py"}),  # load, plan, sync, resume from a file
        r"no rule gives initial",
        frozenset({f"models/first_values/{name}.py" for name in ("initialize", "parametrized")}),
    ),
    "Which texts of a safetensors file are ties?": Question(
        "sources/safetensors.py",
        ("with_ties",),
        frozenset({"tools/convert/planned_files.py"}),
        r"anyrank\.ties",
    ),
}


def name_of(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def askers_of(question: Question) -> set[str]:
    """The modules that import a question's functions."""
    home = "anyrank." + question.home.removesuffix(".py").replace("/", ".")
    found: set[str] = set()
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_of_home = isinstance(node, ast.ImportFrom) and node.module == home
            if is_of_home and {alias.name for alias in node.names} & {*question.answers}:
                found.add(name_of(path))
    return found


def code_of(text: str) -> str:
    """A module's text without its docstrings and comments."""
    text = re.sub(r'"""(.|\n)*?"""', "", text)
    return re.sub(r"#.*", "", text)


@pytest.mark.parametrize("words", QUESTIONS)
def test_who_asks_is_listed(words: str) -> None:
    assert askers_of(QUESTIONS[words]) == QUESTIONS[words].askers


@pytest.mark.parametrize("words", QUESTIONS)
def test_nobody_else_judges(words: str) -> None:
    question = QUESTIONS[words]
    judges = {
        name_of(path)
        for path in SRC.rglob("*.py")
        if re.search(question.signs, code_of(path.read_text(encoding="utf-8")))
    }
    assert judges <= {question.home, *question.allowed}
    home = (SRC / question.home).read_text(encoding="utf-8")
    assert all(f"def {name}(" in home for name in question.answers)
