"""Plain words: values are nouns that say what they are, and functions are verbs.

No room uses a word of the list as the name of a value, a function or a class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[3] / "src" / "anyrank"

# Each folder is a room; "" is the modules beside them.
ROOMS = ("", *sorted(path.parent.name for path in SRC.glob("*/__init__.py")))

# Word -> what to say instead. Of a value each of them hides what the value is.
PARTICIPLE = "a participle names the verb: say what was found, held, given"
PLACE = "a place: say what is there"
PRONOUN = "a pronoun: say what it stands for"
RELATION = "a relation without its ends: use a verb"
WORDS = {
    "found": PARTICIPLE,
    "held": PARTICIPLE,
    "told": PARTICIPLE,
    "said": PARTICIPLE,
    "made": PARTICIPLE,
    "given": PARTICIPLE,
    "taken": PARTICIPLE,
    "gone": PARTICIPLE,
    "meant": PARTICIPLE,
    "here": PLACE,
    "there": PLACE,
    "way": PLACE,
    "place": "a module, a folder, an offset or a position: say which",
    "each": PRONOUN,
    "one": PRONOUN,
    "every": "a pronoun: a list by rank is answers, or values_by_rank",
    "several": PRONOUN,
    "own": "own_ and the noun: own_tensors, own_node",
    "mine": "own_ and the noun: own_files",
    "theirs": PRONOUN,
    "at": RELATION,
    "by": RELATION,
    "of": RELATION,
    "apart": "open_channel, needs_copy: say what happens",
    "in_vain": "hopeless_reason",
    "misfit": "misfit_text, find_misfit: a name for each of the three",
    "lobby": "rendezvous",
}
# Names that users write, with the function that takes them.
PUBLIC = {
    ("every", "Checkpoints.__init__"),
    ("every", "RunOptions"),
    ("every", "SaveOptions"),
    ("every", "parse_cadence"),
    ("of", "Difference"),
    ("held", "Pack"),
    ("held", "Buckets"),
}


def names_in(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, str, int]]:
    """The names that a source gives to values, functions and classes: name, owner and line."""
    for node in ast.iter_child_nodes(tree):
        inner = owner
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, owner, node.lineno
            inner = f"{owner}.{node.name}" if owner else node.name
        elif isinstance(node, ast.arg):
            yield node.arg, owner, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, owner, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, owner, node.lineno
        yield from names_in(node, inner)


def dialect_in(source: str) -> list[str]:
    """The names of a source that are words of the dialect, with the line and what to say."""
    return [
        f"{line}: {name}: {WORDS[name.strip('_').lower()]}"
        for name, owner, line in names_in(ast.parse(source))
        if name.strip("_").lower() in WORDS and (name, owner) not in PUBLIC
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_names_things_plainly(room: str) -> None:
    paths = [*SRC.glob("*.py")] if not room else [*(SRC / room).rglob("*.py")]
    assert paths
    words = {path.name: dialect_in(path.read_text(encoding="utf-8")) for path in paths}
    assert {name: lines for name, lines in words.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "found: int = 1",
        "self.held = 1",
        "def here(): ...",
        "def f(given): ...",
        "def f(*, own=1): ...",
        "class _Held: ...",
        "[each for each in ()]",
        "for each in (): ...",
        "x, (mine, y) = z",
        "with f() as made: ...",
        "if (told := f()): ...",
        "lambda one: 1",
    ],
)
def test_a_word_of_the_dialect_is_found(source: str) -> None:
    assert len(dialect_in(source)) == 1


def test_plain_names_pass() -> None:
    assert dialect_in("own_files = [f(given=1) for file in sorted(x.held)]") == []
    public = "class Checkpoints:\n    def __init__(self, every): ..."
    assert dialect_in(public) == []
    assert len(dialect_in(public.replace("__init__", "save"))) == 1
