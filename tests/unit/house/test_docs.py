"""The documentation as its readers use it: examples run and print what the page says, links lead
somewhere, commands exist, and every public name, argument, knob and private name is told of.

A block of Python runs in this process, after those above it on its page, unless a comment before it
says otherwise:

    <!-- file: NAME -->       the text of a file, which is there when the page's examples run
    <!-- run: N ranks -->     on N ranks, with the imports, functions and classes above it
    <!-- run: torchrun N -->  in this process, and as a script that torchrun has started on N ranks
    <!-- run: tests -->       as a file of tests, each of which is called
    <!-- skip: REASON -->     not at all; it has to compile
    <!-- setup: CODE -->      what the example takes for granted; more of it: tests/page_setups
    <!-- check: CODE -->      behind a block or its output: what the example must have led to

A block of text behind it is what it prints (on the first rank) and the error that it ends in. Only
numbers with a decimal point (seconds, MiB) and checksums may differ. A block between the lines <!--
and --> runs as well: it is what a command of the page does, and readers do not see it.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import io
import json
import re
import shutil
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tests.public import described, integration_names, public_names, returned_classes
from tests.scripts import run_script

import anyrank
from anyrank import cli, settings
from anyrank.files.manifest import FileRecord, Manifest
from anyrank.sources.endings import FILES
from anyrank.testing import run_ranks

ROOT = Path(__file__).parents[3]
SRC = ROOT / "src/anyrank"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
MARK = re.compile(r"<!-- (file|run|skip|setup|check): (.*) -->")
SHELL = ("sh", "console")
HIDDEN = ("<!--", "-->")


def name_of(page: Path) -> str:
    """A page's name in test ids."""
    return str(page.relative_to(ROOT))


def read(page: str) -> str:
    """The text of a page in docs."""
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


# -- blocks ---------------------------------------------------------------------------------------


@dataclass
class Block:
    """A fenced block, and what the comments around it say.

    Attributes:
        page: the file that it is in.
        line: number of its first line, from 1.
        kind: the word behind the fence.
        text: what is between the fences.
        marks: "file", "run", "skip", "setup", "check" -> what the comment says.
        output: the block of text behind it, where there is one.
    """

    page: Path
    line: int
    kind: str
    text: str
    marks: dict[str, str] = field(default_factory=dict[str, str])
    output: str | None = None

    @property
    def place(self) -> str:
        """For tracebacks: line numbers are those of the page."""
        return str(self.page)

    @property
    def source(self) -> str:
        """The text, moved down to its line."""
        return "\n" * (self.line - 1) + self.text


def find_blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    made: list[Block] = []
    marks: dict[str, str] = {}
    is_next = False  # only empty lines and checks since the last block
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        line, number = lines[number], number + 1
        if mark := MARK.fullmatch(line):
            if mark[1] == "check":
                next(b for b in reversed(made) if b.kind == "python").marks["check"] = mark[2]
            else:
                marks[mark[1]] = mark[2]
        elif line.startswith("```"):
            end = lines.index("```", number)
            block = Block(page, number + 1, line[3:].strip(), "\n".join(lines[number:end]), marks)
            if is_next and block.kind == "text" and made[-1].kind == "python":
                made[-1].output = block.text
            made.append(block)
            marks, is_next, number = {}, True, end + 1
        elif line and line not in HIDDEN:
            is_next = False
    return made


def all_blocks() -> Iterator[Block]:
    """Of all pages."""
    for page in PAGES:
        yield from find_blocks(page)


# -- files that the examples use ------------------------------------------------------------------


def write_files(folder: Path) -> None:
    """The files that the examples name, with random values."""
    for block in all_blocks():
        if name := block.marks.get("file"):
            (folder / name).write_text(block.text + "\n", encoding="utf-8")
    shutil.copy(ROOT / "tests/page_setups/model.py", folder)
    namespace: dict[str, Any] = {}
    exec((folder / "model.py").read_text(encoding="utf-8"), namespace)  # noqa: S102 - our page
    torch.manual_seed(0)
    net = {key: value.clone() for key, value in namespace["Net"]().state_dict().items()}
    del net["head.weight"]  # tied to the embedding
    save_file(net, folder / "weights.safetensors")
    torch.save(net, folder / "weights.pt")
    torch.save({"epoch": 3, "state_dict": {f"net.{k}": v for k, v in net.items()}},
               folder / "run.ckpt")  # fmt: skip
    (folder / "weights").mkdir()
    names = sorted(net)
    index: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: net[name] for name in part}, folder / "weights" / file)
        index |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "weights/model.safetensors.index.json").write_text(text, encoding="utf-8")
    with warnings.catch_warnings():  # it says that there is no process group, which is intended
        warnings.simplefilter("ignore", UserWarning)
        dcp.save({"model": net}, checkpoint_id=folder / "dcp", no_dist=True)
    vae = namespace["AutoEncoder"]().state_dict()
    torch.save(vae, folder / "vae.pt")
    write_large(folder / "large.safetensors")


def write_large(path: Path) -> None:
    """32 matrices of 8192 x 8192 in bf16, 4 GiB; a hole in the file system takes their place."""
    nbytes = 2 * 8192**2
    header = json.dumps(
        {
            f"{n}.weight": {
                "dtype": "BF16",
                "shape": [8192, 8192],
                "data_offsets": [n * nbytes, (n + 1) * nbytes],
            }
            for n in range(32)
        }
    ).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 32 * nbytes)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of a reader who follows a page."""
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


# -- running them ---------------------------------------------------------------------------------


def execute(source: str, place: str, namespace: dict[str, Any], may_fail: bool) -> str:
    """Run a block; what it prints, and the error that it ends in."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(source, place, "exec"), namespace)  # noqa: S102 - our page
    except Exception as error:
        if not may_fail:
            raise
        return f"{out.getvalue()}{type(error).__name__}: {error}"
    return out.getvalue()


def definitions(blocks: list[Block]) -> str:
    """The imports, functions and classes of these blocks."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    nodes = [node for block in blocks for node in ast.parse(block.text).body]
    return "\n".join(ast.unparse(node) for node in nodes if isinstance(node, kinds))


def run_here(block: Block, namespace: dict[str, Any]) -> str:
    """Run a block between its setup and its check; what it prints."""
    execute(block.marks.get("setup", ""), block.place, namespace, False)
    printed = execute(block.source, block.place, namespace, block.output is not None)
    execute(block.marks.get("check", ""), block.place, namespace, False)
    return printed


def job(above: str, block: Block) -> str:
    """The same on one rank, with definitions from above."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    execute(above, block.place, namespace, False)
    return run_here(block, namespace)


def run_torchrun(block: Block, num_ranks: str, folder: Path) -> str:
    """What the script prints, all ranks together."""
    script = folder / block.marks.get("file", "script.py")
    script.write_text(block.text, encoding="utf-8")
    return "".join(run_script(int(num_ranks), str(script)))


def run_tests(block: Block, folder: Path) -> str:
    """Call every test of a block, as pytest would."""
    name = f"test_of_reader_{folder.name}".replace("-", "_")  # ranks keep the modules of others
    (folder / f"{name}.py").write_text(block.text, encoding="utf-8")
    module = importlib.import_module(name)
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()
    return ""


def run_block(block: Block, before: list[Block], namespace: dict[str, Any], folder: Path) -> str:
    """Run a block of Python as its comments say; what it prints, on all ranks together or first."""
    how = block.marks.get("run", "")
    if how == "tests":
        return run_tests(block, folder)
    if how.endswith(" ranks"):
        # blocks below it may use what it defines
        execute(definitions([block]), block.place, namespace, False)
        return run_ranks(int(how.split()[0]), job, definitions(before), block)[0]
    printed = run_here(block, namespace)
    if how.startswith("torchrun "):
        compare(block, printed)
        return run_torchrun(block, how.split()[1], folder)
    return printed


def compare(block: Block, printed: str) -> None:
    """What a block prints must be what the page says."""
    if block.output is not None:
        assert shape_of(printed) == shape_of(block.output), f"{block.place}:{block.line}"


def shape_of(text: str) -> list[str]:
    """Lines without trailing spaces, and without what differs from run to run."""
    # one number or one for each rank, "0.1 0.1 MiB"; a CRC-32
    loose = re.compile(r"\d+\.\d+( \d+\.\d+)*|\b[0-9a-f]{8}\b")
    return [loose.sub("#", line).rstrip() for line in text.rstrip("\n").splitlines()]


def with_examples() -> list[Any]:
    """The pages that have blocks of Python; the first one for readers has a whole run on ranks."""
    found = [page for page in PAGES if any(block.kind == "python" for block in find_blocks(page))]
    slow = pytest.mark.slow
    return [pytest.param(one, marks=slow) if one.name == "start.md" else one for one in found]


@pytest.mark.parametrize("page", with_examples(), ids=name_of)
def test_examples_run_and_print_what_the_page_says(page: Path, workplace: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    before: list[Block] = []
    for block in find_blocks(page):
        if block.kind in SHELL:
            for code in re.findall(r'python -c "(.*)"', block.text):
                execute(code, block.place, {}, False)
        if block.kind != "python" or set(block.marks) == {"file"}:  # run by those that import it
            continue
        compile(block.source, block.place, "exec")
        if "skip" not in block.marks:
            compare(block, run_block(block, before, namespace, workplace))
            before.append(block)
    assert not dist.is_initialized()


WRONG = {
    "an error": ("1 / 0", "", ZeroDivisionError),
    "another output": ("print(2)", "3", AssertionError),
    "an error that does not come": ("print(2)", "ValueError: 2", AssertionError),
    "an error on a rank": ("<!-- run: 2 ranks -->\nimport nothing_of_the_kind", "", Exception),
    "a check": ("x = 1\n<!-- check: assert x == 2 -->", "", AssertionError),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_example_that_is_wrong_is_found(name: str, tmp_path: Path) -> None:
    text, output, kind = WRONG[name]
    marks = {m[1]: m[2] for m in MARK.finditer(text)}
    code = MARK.sub("", text)
    block = Block(tmp_path / "page.md", 1, "python", code, marks, output or None)
    with pytest.raises(kind):
        compare(block, run_block(block, [], {}, tmp_path))


def test_outputs_may_differ_in_decimals_only() -> None:
    assert shape_of("read  0.1 0.2 MiB") == shape_of("read  7.5 MiB\n")
    assert shape_of("3 tensors") != shape_of("4 tensors")


# -- links ----------------------------------------------------------------------------------------


def without_code(text: str) -> str:
    """A page without its blocks and without what stands between backticks."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def anchors(page: Path) -> set[str]:
    """What a link to a heading of a page may say behind the #."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#{1,6} (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def find_broken_links(page: Path, text: str) -> list[str]:
    """Links to files and headings that are not there. Other hosts are not asked."""
    broken: list[str] = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match(r"https://", link):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert find_broken_links(page, page.read_text(encoding="utf-8")) == []


def test_a_broken_link_is_found() -> None:
    page = ROOT / "README.md"
    text = "[a](docs/load.md) [b](docs/laod.md) [c](docs/load.md#nothing) `[d](e)`"
    assert find_broken_links(page, text) == ["docs/laod.md", "docs/load.md#nothing"]


# -- paths ----------------------------------------------------------------------------------------

PATH = re.compile(r"`((?:benchmarks|docs|examples|src|tests)/[\w./*-]+)|`(test_\w+\.py)`")
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def find_lost_paths(text: str) -> list[str]:
    """Paths of this repository between backticks, and names of tests, that are not there."""
    names = [path or f"tests/**/{test}" for path, test in PATH.findall(text)]
    return [name for name in names if not any(ROOT.glob(name.rstrip("/")))]


def docstrings(path: Path) -> str:
    """Of a file and of what it defines."""
    return "\n".join(
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    )


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_paths_on_pages_exist(page: Path) -> None:
    assert find_lost_paths(page.read_text(encoding="utf-8")) == []


def test_paths_in_docstrings_of_tests_exist() -> None:
    lost = {name_of(path): find_lost_paths(docstrings(path)) for path in TESTS}
    assert {name: paths for name, paths in lost.items() if paths} == {}


def test_a_lost_path_is_found() -> None:
    text = "`src/anyrank/cli` `tests/unit/test_no.py` `benchmarks/load.py --quick`"
    text += " `test_docs.py` `test_no.py` `src/no/*.py`"
    lost = ["tests/unit/test_no.py", "tests/**/test_no.py", "src/no/*.py"]
    assert find_lost_paths(text) == lost


# -- commands -------------------------------------------------------------------------------------

TARGETS = set(re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.M))
ENVIRONMENT = r"(?:[A-Z_]+=\S+ )*"
PROGRAMS = "make|anyrank|pip|python|torchrun"
OTHERS = ("cd ", "git clone ", "#")


def files_of_pages() -> set[str]:
    """The names of the scripts that pages show in full."""
    return {block.marks["file"] for block in all_blocks() if "file" in block.marks}


def is_known(line: str) -> bool:
    """Whether a line of shell names a target, a command or a script that is there."""
    line = re.sub(rf"^(?:\$ )?{ENVIRONMENT}(?:[\w./]*/)?", "", line.split("  #")[0]).strip()
    program, *words = line.split()
    if program == "make":
        return all(word in TARGETS or "=" in word for word in words)
    if program == "anyrank":
        return knows_command(words)
    if program == "pip":
        return knows_package(words)
    if program in ("python", "torchrun"):
        if words[:1] == ["-c"]:
            return True  # it runs with its page
        scripts = [word for word in words if word.endswith(".py")]
        return len(scripts) == 1 and (
            (ROOT / scripts[0]).exists() or scripts[0] in files_of_pages()
        )
    return line.startswith(OTHERS)


def knows_command(words: list[str]) -> bool:
    """Whether `anyrank` has this command, with these options."""
    script = next((n for n, word in enumerate(words) if word.endswith(".py")), len(words))
    words = words[: script + 1]  # behind a script are its own options
    names = [word for word in words if not word.startswith("-")]
    if not names:
        return set(words) <= {"--help", "-h", "--version"}
    command = cli.main.get_command(click.Context(cli.main), names[0])
    if command is None:
        return False
    known = {option for parameter in command.params for option in parameter.opts}
    if command.context_settings.get("allow_interspersed_args") is False:  # the script has its own
        words = words[: next((n for n, word in enumerate(words) if word.endswith(".py")), None)]
    given = {word.split("=")[0] for word in words if word.startswith("-")}
    return given <= known | {"--help", "-h"}


def knows_package(words: list[str]) -> bool:
    """Whether `pip install` gets this project, with extras that it has."""
    asked = re.fullmatch(r"install '?(?:\.|anyrank)(?:\[([a-z0-9,]+)\])?'?", " ".join(words))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = (asked[1] or "").split(",") if asked else []
    return asked is not None and set(extras) - {""} <= set(project["optional-dependencies"])


def find_unknown_commands(text: str) -> list[str]:
    """Lines of shell, and commands in the running text, that name nothing that is there."""
    lines = re.findall(r"`((?:make|anyrank) [^`\n]+)`", text)
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S):
        prompts = re.findall(r"^\$ (.+)$", block, flags=re.M)  # the rest is output
        if kind in SHELL:
            lines += prompts or [line for line in block.splitlines() if line.strip()]
        elif not kind:
            lines += prompts or re.findall(rf"^(?:{PROGRAMS}) .+$", block, flags=re.M)
    return [line for line in lines if not is_known(line)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    assert find_unknown_commands(page.read_text(encoding="utf-8")) == []


def test_a_command_that_is_not_there_is_found() -> None:
    good = ["make test", "make gpu VENV_PYTHON=python3", "anyrank plan x --ranks 8", "anyrank -h"]
    good += [".venv/bin/anyrank demo", "python examples/finetune.py", "A=1 make docs"]
    good += ["anyrank run --ranks 2 train.py --of-the-script 3", "pip install '.[s3]'"]
    bad = [
        "make tset",
        "anyrank laod x",
        "anyrank plan x --rank 8",
        "anyrank run --rank 2 train.py",
        "python examples/no.py",
        "pip install 'anyrank[no]'",
        "pip install another",
        "rm x",
    ]
    text = "\n".join(["```sh", *good, *bad, "```", "`make nothing`"])
    assert find_unknown_commands(text) == ["make nothing", *bad]


# -- nothing is left out --------------------------------------------------------------------------


def lacks(text: str, names: list[str]) -> list[str]:
    """Names that stand nowhere between backticks, alone or with =, ( or a dot behind or before."""
    spans = re.findall(r"`([^`\n]+)`", text)
    words = {word for span in spans for word in re.findall(r"\w+", span)}
    return [name for name in names if name not in words]


def test_every_public_name_is_told_of() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    names = [name for name in anyrank.__all__ if name != "__version__"]
    assert lacks(text, names) == []


@pytest.mark.parametrize(
    "function",
    [
        *(anyrank.load, anyrank.materialize, anyrank.plan, anyrank.freeze, anyrank.sync),
        *(anyrank.check, anyrank.TrainState, anyrank.Checkpoints, anyrank.Checkpoints.resume),
        *(anyrank.ElasticLoader, anyrank.ElasticLoader.from_shards, anyrank.Pack, anyrank.Buckets),
        *(anyrank.ElasticLoader.from_iterable, anyrank.row_counts),
    ],
    ids=lambda value: value.__qualname__,
)
def test_every_argument_is_told_of(function: Callable[..., Any]) -> None:
    names = set(inspect.signature(function).parameters) - {"self", "args", "kwargs", "others"}
    assert sorted(names - described(function)) == []


@pytest.mark.parametrize("function", [run_ranks, anyrank.testing.RankPool.run])
def test_every_argument_of_the_tests_is_told_of(function: Callable[..., Any]) -> None:
    names = set(inspect.signature(function).parameters) - {"self", "args", "kwargs"}
    assert lacks(read("check.md"), sorted(names)) == []


@pytest.mark.parametrize("kind", [Manifest, FileRecord])
def test_every_field_of_a_file_is_told_of(kind: Any) -> None:
    assert lacks(read("formats.md"), [one.name for one in fields(kind)]) == []


def test_what_is_not_told_of_is_found() -> None:
    def some(known: int, unknown: int) -> None:
        """Do something.

        Args:
            known: a number.
        """

    assert described(some) == {"known"}


@pytest.mark.parametrize("knob", settings.KNOBS, ids=lambda knob: knob.name)
def test_knobs_are_told_of_with_their_units_and_defaults(knob: settings.Knob) -> None:
    row = next(
        row for row in read("reference.md").splitlines() if row.startswith(f"| `{knob.name}`")
    )
    assert row.split("|")[2].strip().split()[0] == str(knob.default)
    assert re.fullmatch(r"ANYRANK_[A-Z_]+_(BYTES|SEC|THREADS)", knob.name)


def test_every_file_ending_is_told_of() -> None:
    text = read("formats.md")
    assert [ending for ending in FILES if f"`{ending}`" not in text] == []


def test_every_fault_point_is_told_of() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in SRC.rglob("*.py"))
    points = set(re.findall(r'faults\.point\("([^"]+)"\)', sources))
    assert points
    assert [point for point in points if f"`{point}`" not in read("check.md")] == []


def test_versions_are_those_of_the_constraints() -> None:
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M))
    rows = [line for line in read("reference.md").splitlines() if line.startswith("| anyrank | ")]
    packages = [cell.strip().lower() for cell in rows[0].strip("|").split("|")][1:-1]
    row = next(line for line in read("reference.md").splitlines() if line.startswith("| 0."))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert anyrank.__version__.startswith(cells[0])
    assert cells[1:-1] == [pins[package] for package in packages]


# -- pictures and the reference -------------------------------------------------------------------


def load_pictures() -> Any:
    """The module that draws."""
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs/pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pictures"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_pictures_are_those_that_the_planner_draws() -> None:
    drawn = load_pictures().drawn()
    there = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("docs/pictures/*")}
    assert there == drawn, "run `python docs/pictures.py`"


def test_rooms_in_the_pictures_exist() -> None:
    streets = load_pictures().STREETS
    rooms = {room for street in streets.values() for _, _, room in street}
    assert [room for room in rooms if not (SRC / room).is_dir()] == []


def find_lost_pictures(page: Path, text: str) -> list[str]:
    """Pictures of a page that are not there."""
    names = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    names += re.findall(r"^```\{image\} (\S+)", text, flags=re.M)
    return [name for name in names if not (page.parent / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pictures_of_pages_exist(page: Path) -> None:
    assert find_lost_pictures(page, page.read_text(encoding="utf-8")) == []


def test_a_lost_picture_is_found() -> None:
    text = '<img src="docs/pictures/share-light.svg"><img src="docs/no.svg">\n```{image} no.png'
    assert find_lost_pictures(ROOT / "README.md", text) == ["docs/no.svg", "no.png"]


def test_the_reference_has_every_public_name_and_every_class_that_these_return() -> None:
    names = public_names() | integration_names()
    asked = {*names, *returned_classes(names.values())}
    listed = re.findall(r"^\.\. auto\w+:: anyrank\.([\w.]+)(?:\(\))?$", read("api.md"), flags=re.M)
    assert asked - set(listed) == set()
    assert {name for name in listed if "." not in name} == set(public_names())
    assert "training.steps.step.Step" in asked
    assert len(listed) == len(set(listed))


def test_every_page_is_on_the_front_page() -> None:
    """In its navigation, and as a link for those who read it without Sphinx."""
    text = read("index.md")
    blocks = re.findall(r"^```{toctree}\n(.*?)^```$", text, flags=re.M | re.S)
    entries = "\n".join(block for block in blocks if ":glob:" not in block)
    listed = re.findall(r"^(?:.* <)?([\w-]+)>?$", entries, flags=re.M)
    linked = re.findall(r"\]\(([\w-]+)\.md\)", text[text.index("| **start**") :])
    pages = sorted({path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"})
    assert sorted(listed) == pages
    assert sorted(linked) == pages


def find_lost_rooms(text: str) -> list[str]:
    """Rooms that CONTRIBUTING.md does not name, and files and classes in it that are gone."""
    spans = set(re.findall(r"`([^`\n]+)`", text))
    rooms = {path.parent.name for path in SRC.glob("*/__init__.py")}
    folders = (ROOT, SRC.parent, SRC)
    files = {span for span in spans if re.fullmatch(r"[\w/]+/\w+\.py", span)}
    gone = {file for file in files if not any((folder / file).exists() for folder in folders)}
    source = "\n".join(path.read_text(encoding="utf-8") for path in SRC.rglob("*.py"))
    classes = {*re.findall(r"^class (\w+)", source, re.MULTILINE)}
    gone |= {
        span
        for span in spans
        if re.fullmatch(r"[A-Z][a-z]\w+\.\w+", span) and span.partition(".")[0] not in classes
    }
    return sorted(rooms - spans) + sorted(gone)


def test_the_map_of_the_rooms_is_that_of_the_tree() -> None:
    assert find_lost_rooms((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")) == []


def test_a_lost_room_is_found() -> None:
    found = find_lost_rooms("`training/steps/step.py` `steps/no.py` `Step.loss` `NoStep.loss`")
    assert {"training", "steps/no.py", "NoStep.loss"} <= {*found}
    assert not {"training/steps/step.py", "Step.loss"} & {*found}


# -- private names of other packages --------------------------------------------------------------

# os._exit is public; the others are parts of names of dtypes, keys and files
NOT_PRIVATE = {"_exit", "_x2", "_rank_", "_world_size_", "_random"}
NOT_PRIVATE |= {"_make", "_replace"}  # of named tuples, whose documentation has them
NOT_PRIVATE |= {
    "_scale",
    "_scale_inv",
    "_scales",
    "_blocks",
    "_weights",
    "_sizes",
    "_dtypes",
    "_oop",
}  # ends of names

HOOKS = {
    f"_{way}_{when}hooks" for way in ("forward", "backward") for when in ("", "pre_")
}  # torch's


def private_names(sources: dict[Path, str]) -> set[str]:
    """Names with one leading underscore that the sources use and do not define.

    An attribute that a class gives itself is its own within its folder: `trainer._results` is
    another's, though some class of another folder sets `self._results`.
    """
    methods, own, used = set[str](), set[tuple[Path, str]](), set[tuple[Path | None, str]]()
    for path, text in sources.items():
        folder = path.parent
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                methods |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add((folder, node.name))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add((folder, node.id))
            elif isinstance(node, ast.Attribute):
                is_self = ast.unparse(node.value) == "self"
                if is_self and isinstance(node.ctx, ast.Store):
                    own.add((folder, node.attr))
                else:
                    used.add((None if is_self else folder, node.attr))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                parts = [part for alias in node.names for part in alias.name.split(".")]
                parts += (getattr(node, "module", None) or "").split(".")
                used |= {(folder, part) for part in parts}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used |= {(folder, node.value)} if node.value.isidentifier() else set()
    anywhere = {name for _, name in own}
    names = {
        name
        for folder, name in used
        if name not in methods
        and (name not in anywhere if folder is None else (folder, name) not in own)
    }
    return {n for n in names - NOT_PRIVATE if re.match(r"_[a-zA-Z]", n)}


def test_every_private_name_of_others_is_told_of() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in SRC.rglob("*.py")}
    assert lacks(read("dev/private-names.md"), sorted(private_names(sources))) == []


def test_a_private_name_is_found() -> None:
    text = "import torch._a\nx = y._b\ngetattr(y, '_c')\ndef _d(): ...\n_d(); y.e; y.__f__"
    text += "\nself._g = 1; self._g; y._h = self._i"
    found = private_names({Path("a/x.py"): text, Path("b/y.py"): "self._h = self._b = 1"})
    assert found == {"_a", "_b", "_c", "_h", "_i"}


def test_the_private_names_of_the_table_of_frameworks_are_told_of() -> None:
    table = importlib.import_module("anyrank.integrations.framework_names").NAMES
    names = {n for classes in table.values() for names in classes.values() for n in names}
    private = sorted(name for name in names if name.startswith("_"))
    assert len(private) > 20
    assert lacks(read("dev/private-names.md"), private) == []
    folder = SRC / "integrations"
    sources = {path: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    classes = {path.rpartition(".")[2] for classes in table.values() for path in classes}
    assert private_names(sources) - names - classes - HOOKS == set()
