"""The rules of CONTRIBUTING.md that a program can hold.

Each rule is a function that returns what breaks it, so that one test applies it to the repository
and another proves, on something that breaks it, that it can fail.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import anyrank
from anyrank import settings
from anyrank.training.exact.checks import environment

ROOT = Path(__file__).parents[3]
SRC = ROOT / "src"

# -- imports point one way ------------------------------------------------------------------------

BASE = {"errors", "checks", "settings", "faults", "wording", "versions"}
GROUND = BASE | {"tensors", "files", "world"}
WEIGHTS = GROUND | {"sources", "models", "loading", "live"}
# Wing of anyrank -> the other wings that it may import, anywhere in its text. "anyrank" is the
# public interface itself.
MAY_IMPORT = {
    **{name: set[str]() for name in BASE},
    "checks": {"wording"},
    "settings": {"errors"},
    "tensors": BASE,
    "files": BASE | {"tensors"},
    "world": BASE,
    "sources": BASE | {"tensors", "files"},
    "models": GROUND | {"sources"},
    "loading": GROUND | {"sources", "models"},
    "live": GROUND | {"sources", "models", "loading"},
    "training": GROUND | {"models"},
    "runs": WEIGHTS | {"training"},
    "tools": WEIGHTS | {"runs"},
    "watching": WEIGHTS | {"training"},
    "memory": GROUND | {"training"},
    # models, for what it judges once: whether an adapter fits, and what it changes.
    "integrations": {"anyrank", "versions", "wording", "world", "models"},
}
WINGS = {*MAY_IMPORT}
MAY_IMPORT |= {
    "cli": WINGS | {"anyrank"},
    "testing": WINGS | {"anyrank"},
    "__main__": {"cli"},
}
# The one import against the direction.
UPWARD = ("anyrank.loading.load", "live")
# Imports within functions of what is anyrank's own: (module, what it opens) -> why that is not
# imported at the top. The commands of `cli` are one case: `anyrank --help` loads no torch.
DOORS = {
    ("loading.load", "live"): "a dict of sharded tensors is a live model; against the direction",
    ("loading.load", "loading.sharing"): "a rank that reads its own bytes skips it",
    ("loading.agreed_plan", "loading.sharing"): "the same",
    ("sources.source", "sources.foreign"): "other tools' runs",
    ("files.storage", "files.object_store"): "fsspec, for URLs alone",
    ("training.steps.loader", "training.streams"): "streams, which map-style datasets skip",
    ("training.steps.loader", "training.exact"): "exact=True",
    ("runs.resume.listeners", "runs.peers"): "peers=: snapshots in memory",
    ("runs.resume.resume", "runs.adopt"): "other tools' checkpoints, and their readers",
    ("watching.launched", "watching.hang"): "`check` of a script watches nothing",
    ("testing.server", "testing"): "the server forks ranks, and is none itself",
}


def read_sources(root: Path) -> dict[str, str]:
    """Module name -> text, for every module of anyrank."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): (
            path.read_text(encoding="utf-8")
        )
        for path in sorted(root.rglob("*.py"))
    }


def find_imports(module: str, sources: dict[str, str]) -> set[str]:
    """What a module imports of anyrank anywhere in its text, but for types alone.

    Relative imports start with a dot.
    """
    found: set[str] = set()
    tree = ast.parse(sources[module])
    for_types = {node for part in ast.walk(tree) if _is_typing(part) for node in ast.walk(part)}
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in sources else base for name in names}
    return {name for name in found if name.split(".")[0] in ("anyrank", "")}


def wing_of(module: str) -> str:
    """The wing of anyrank that a module is in."""
    return module.removeprefix("anyrank.").split(".")[0]


def _is_typing(node: ast.AST) -> bool:
    """Whether imports within are for type checkers alone."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def find_wrong_directions(sources: dict[str, str]) -> list[str]:
    """Imports against the direction, relative imports, and wings that the table does not know."""
    wrong: list[str] = []
    for module in sources.keys() - {"anyrank"}:
        wing = wing_of(module)
        allowed = MAY_IMPORT[wing] | {wing} if wing in MAY_IMPORT else set[str]()
        for target in find_imports(module, sources):
            if wing_of(target) not in allowed and (module, wing_of(target)) != UPWARD:
                wrong.append(f"{module} imports {target}")
    return sorted(wrong)


def find_circles(sources: dict[str, str]) -> list[set[str]]:
    """Sets of modules that import one another in a circle, imports within functions counted."""
    graph = {
        module: {
            target
            for target in find_imports(module, sources) & sources.keys()
            # `from anyrank.files import dcp`, inside files, needs nothing of the package itself.
            if not module.startswith(f"{target}.")
        }
        for module in sources.keys() - {"anyrank"}  # its imports are for type checkers only
    }
    reached = {module: _reached_from(module, graph) for module in graph}
    circles = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in graph
        if module in reached[module]
    }
    return [{*circle} for circle in circles]


def _reached_from(module: str, graph: dict[str, set[str]]) -> set[str]:
    """The modules that importing a module imports."""
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        new = graph[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def test_imports_point_one_way() -> None:
    assert find_wrong_directions(read_sources(SRC)) == []


def test_no_modules_import_in_a_circle() -> None:
    assert find_circles(read_sources(SRC)) == []


def test_a_circle_through_a_function_is_found() -> None:
    late = "def f():\n    from anyrank.files.b import x"
    sources = {"anyrank.files.a": late, "anyrank.files.b": "from anyrank.files.a import f"}
    assert find_circles(sources) == [{"anyrank.files.a", "anyrank.files.b"}]
    typing = "if TYPE_CHECKING:\n    from anyrank.files.b import x"
    assert find_circles(sources | {"anyrank.files.a": typing}) == []


def find_late_imports(sources: dict[str, str]) -> set[tuple[str, str]]:
    """Modules, and what of anyrank they import within functions."""
    return {
        (module.removeprefix("anyrank."), str(node.module).removeprefix("anyrank."))
        for module, text in sources.items()
        for part in ast.walk(ast.parse(text))
        if isinstance(part, ast.FunctionDef)
        for node in ast.walk(part)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("anyrank.")
    }


def test_imports_within_functions_are_doors() -> None:
    found = {entry for entry in find_late_imports(read_sources(SRC)) if entry[0][:4] != "cli."}
    doors = {(module, door) for module, door in DOORS}
    unknown = {(m, t) for m, t in found if not any(m == n and t.startswith(d) for n, d in doors)}
    unused = {(n, d) for n, d in doors if not any(m == n and t.startswith(d) for m, t in found)}
    assert (unknown, unused) == (set(), set())
    assert len(DOORS) <= 20
    late = "def f():\n    from anyrank.files.b import x"
    assert find_late_imports({"anyrank.files.a": late}) == {("files.a", "files.b")}


# -- what only its module uses has an underscore --------------------------------------------------


def find_needless_publicity(sources: dict[str, str], rest: str) -> list[str]:
    """Functions without an underscore whose names no other module has, nor the rest."""
    words = Counter(w for text in sources.values() for w in set(re.findall(r"\w+", text)))
    known = set(re.findall(r"\w+", rest)) | {"main"}
    return [
        f"{module}.{node.name}"
        for module, text in sources.items()
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if words[node.name] == 1 and node.name not in known
    ]


def test_what_only_its_module_uses_has_an_underscore() -> None:
    places = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("docs/*.md")]
    rest = "\n".join(path.read_text(encoding="utf-8") for path in places)
    assert find_needless_publicity(read_sources(SRC), rest) == []


def test_needless_publicity_is_found() -> None:
    sources = {
        "anyrank.a": "def own(): ...\ndef shared(): ...\ndef _hidden(): ...",
        "anyrank.b": "",
    }
    assert find_needless_publicity(sources | {"anyrank.b": "shared()"}, "") == ["anyrank.a.own"]
    assert find_needless_publicity(sources, "own and shared") == []


# -- a name that asks yes or no has that answer ---------------------------------------------------


def find_odd_predicates(sources: dict[str, str]) -> list[str]:
    """Functions named is_, has_ or are_ that are not annotated to return a bool."""
    functions = (
        (module, node)
        for module, text in sources.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.lstrip("_").startswith(("is_", "has_", "are_"))
    )
    return [
        f"{module}.{node.name}"
        for module, node in functions
        if node.returns is None
        or not re.match(r"bool$|TypeIs\[|TypeGuard\[", ast.unparse(node.returns))
    ]


def test_a_name_that_asks_yes_or_no_has_that_answer() -> None:
    assert find_odd_predicates(read_sources(SRC)) == []


def test_an_odd_predicate_is_found() -> None:
    lines = [
        "def is_a() -> bool: ...",
        "def _has_b() -> ValueError: ...",
        "class C:\n    async def are_d(self): ...",
        "def is_e(x: object) -> TypeIs[int]: ...",
        "def issue() -> str: ...",
    ]
    assert find_odd_predicates({"anyrank.a": "\n".join(lines)}) == [
        "anyrank.a._has_b",
        "anyrank.a.are_d",
    ]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("anyrank.tensors.reads", "from anyrank.files.spans import read"),
        ("anyrank.tensors.reads", "from anyrank import files"),
        ("anyrank.files.spans", "import anyrank.world.ranks"),
        ("anyrank.files.spans", "def f():\n    from anyrank.loading import load"),
        ("anyrank.tools.inspect.diff", "from anyrank.memory import tile"),
        ("anyrank.world.ranks", "from anyrank.tensors.box import Box"),
        ("anyrank.loading.load", "import anyrank"),
        ("anyrank.loading.load", "from anyrank.testing.fault import Fault"),
        ("anyrank.loading.plan", "def f():\n    from anyrank.live import sync"),
        ("anyrank.memory.tile", "from anyrank.loading.load import load"),
        ("anyrank.errors", "from anyrank import settings"),
        ("anyrank.tensors.reads", "from .box import Box"),
        ("anyrank.integrations.jax", "from anyrank.errors import AnyrankError"),
        ("anyrank.runs.state.train_state", "from anyrank.integrations import lightning"),
        ("anyrank.newfolder.x", "from anyrank.errors import AnyrankError"),
        ("anyrank.training.steps.loader", "from anyrank.runs.resume.loop import run"),
        ("anyrank.training.steps.loader", "def f():\n    from anyrank.memory import tile"),
    ],
)
def test_a_wrong_import_is_found(module: str, line: str) -> None:
    others = """
        memory memory.tile files settings world.ranks live loading loading.load runs.resume.loop
        testing.fault tensors.box
    """
    sources = {"anyrank": ""} | {f"anyrank.{name}": "" for name in others.split()} | {module: line}
    assert [found.split(" imports ")[0] for found in find_wrong_directions(sources)] == [module]


# -- nothing runs what a file holds ---------------------------------------------------------------

# Modules that may unpickle: the reader that knows what it allows, what our own ranks and workers
# sent, and what torch's recorder of this process has written, which has no class.
UNPICKLE = {
    "anyrank.sources.readers.pickles",
    "anyrank.training.data.batches",
    "anyrank.watching.recorder",
    "anyrank.world.agreement",
    "anyrank.world.ranks",
}


def find_unpickling(sources: dict[str, str]) -> list[str]:
    """Modules with a call of pickle, or of a loader upon it, by the names of the standard ones."""
    return [
        module
        for module, text in sources.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in ("pickle", "_pickle", "marshal", "shelve", "torch", "dcp")
        and node.attr in ("load", "loads", "open", "Unpickler")
    ]


def test_files_are_unpickled_in_one_place() -> None:
    """Its reader is attacked in tests/hostile, for every format and tool."""
    found = find_unpickling(read_sources(SRC))
    assert {module for module in found if not module.startswith("anyrank.testing.")} == UNPICKLE
    assert find_unpickling({"a": "torch.load('x')", "b": "pickle.dumps(1)"}) == ["a"]


# -- nothing reads the interpreter ----------------------------------------------------------------

INTERPRETER = re.compile(
    r"gc\.get_objects|gc\.disable|import opcode|import dis\b|ctypes\.pythonapi"
    r"|setprofile|_getframe|currentframe|__class__ ="
)


def find_interpreter_reads(sources: dict[str, str]) -> list[str]:
    """Modules that look into the interpreter, or change what it does."""
    return [module for module, text in sources.items() if INTERPRETER.search(text)]


def test_nothing_reads_the_interpreter() -> None:
    assert find_interpreter_reads(read_sources(SRC)) == []
    assert find_interpreter_reads({"a": "import dis\n", "b": "import dispatch"}) == ["a"]


# -- what an import loads -------------------------------------------------------------------------

# Third-party modules that a user of one function must not pay for, by their import names.
HEAVY = ["accelerate", "click", "fsspec", "lightning", "peft", "plotly", "pytorch_lightning"]
HEAVY += ["rich", "s3fs", "safetensors", "transformers", "xxhash"]


def loaded_by(code: str, watched: Iterable[str]) -> set[str]:
    """Which of the watched modules a fresh Python has loaded after running the code."""
    tail = f"\nimport sys; print(*[name for name in {list(watched)} if name in sys.modules])"
    command = [sys.executable, "-c", code + tail]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.splitlines()[-1].split())


def test_public_names_load_torch_and_no_other_package() -> None:
    code = "import anyrank\nfor name in anyrank.__all__: getattr(anyrank, name)"
    assert loaded_by(code, [*HEAVY, "torch"]) == {"torch"}


def test_a_plain_load_loads_torch_and_no_other_package(tmp_path: Path) -> None:
    """Nor what shards: a file of safetensors is read by anyrank itself."""
    path = tmp_path / "a.safetensors"
    save_file(torch.nn.Linear(2, 2).state_dict(), path)
    code = f"import torch, anyrank; anyrank.load(torch.nn.Linear(2, 2), {str(path)!r})"
    assert loaded_by(code, [*HEAVY, *SHARDING, "torch"]) == {"torch"}


def test_a_run_is_saved_and_resumed_without_numpy(tmp_path: Path) -> None:
    """torch works without it, and pip does not install it with torch."""
    code = f"""
import sys, warnings
sys.modules["numpy"] = None  # an import of it fails
warnings.simplefilter("ignore", UserWarning)
import torch, anyrank
for step in (0, 1):
    state = anyrank.TrainState(torch.nn.Linear(2, 2), seed=0)
    with anyrank.Checkpoints({str(tmp_path / "run")!r}, state) as ckpts:
        report = ckpts.resume()
        ckpts.step_done()
        ckpts.save()
assert report is not None and state.step == 2
loader = anyrank.ElasticLoader([torch.ones(3)], global_batch=1, microbatch=1, num_workers=1)
for step in loader:
    assert [int(batch.sum()) for batch in step.microbatches(torch.nn.Identity())] == [3]
    loader.commit()
"""
    assert loaded_by(code, ["numpy.linalg"]) == set()


def test_exact_sums_need_no_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from sources on PYTHONPATH, which have no metadata."""
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Path(name).read_text())
    assert environment(torch.nn.Linear(1, 1))["anyrank"] == anyrank.__version__


# Torch's packages of sharded tensors and modules, and what comes with them: 0.6 s.
SHARDING = ["sympy", "torch.distributed.fsdp", "torch.distributed.tensor"]

PLAIN_CALLS = """
import contextlib, sys, torch, anyrank
from safetensors.torch import save_file

folder = sys.argv[1]
def model(): return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
save_file(model().state_dict(), folder + "/a.safetensors")
torch.save(model().state_dict(), folder + "/a.pt")
for source in (folder + "/a.safetensors", folder + "/a.pt", model().state_dict()):
    anyrank.plan(model(), source)
    anyrank.load(model(), source)
with anyrank.meta(): on_meta = model()
anyrank.materialize(on_meta)
anyrank.sync(model(), on_meta)
anyrank.freeze(model())
anyrank.check(model())
anyrank.inspect(folder + "/a.pt")
anyrank.diff(folder + "/a.pt", folder + "/a.safetensors")
anyrank.convert(folder + "/a.pt", folder + "/b.safetensors")
loader = anyrank.ElasticLoader(torch.zeros(4, 2), global_batch=4, microbatch=2)
with anyrank.Checkpoints(folder + "/run", anyrank.TrainState(model(), data=loader)) as ckpts:
    ckpts.resume()
from anyrank.cli import main
for command in ("inspect a.safetensors", "verify a.pt", "diff a.pt a.safetensors"):
    name, *files = command.split()
    with contextlib.suppress(SystemExit):
        main([name, *(f"{folder}/{file}" for file in files)], standalone_mode=False)
"""


def test_what_shards_nothing_loads_no_sharded_classes(tmp_path: Path) -> None:
    """All public names, commands, and what a process does with plain models until its first save,
    which writes DCP's index; an optimizer loads them by itself.
    """
    names = "for name in anyrank.__all__: getattr(anyrank, name)"
    code = f"import sys\nsys.argv[1:] = [{str(tmp_path)!r}]\n{PLAIN_CALLS}{names}"
    assert loaded_by(code, [*SHARDING, "torch", "transformers"]) == {"torch"}


def test_integrations_are_there_and_load_no_framework() -> None:
    code = "import anyrank\nassert 'lightning' in dir(anyrank.integrations)"
    assert loaded_by(code, [*HEAVY, "torch"]) == set()
    code = "import anyrank\nassert anyrank.integrations.run.RunOptions.__doc__"  # as pages name it
    assert loaded_by(code, ["transformers", "lightning", "accelerate"]) == set()
    with pytest.raises(AttributeError, match="has no attribute 'keras'"):
        anyrank.integrations.keras  # pyright: ignore # noqa: B018


def test_a_loaded_package_is_found() -> None:
    assert loaded_by("import rich, click", HEAVY) == {"rich", "click"}


# -- public names ---------------------------------------------------------------------------------


def find_typed_names(text: str) -> dict[str, str]:
    """Name -> module, as the TYPE_CHECKING block of the package imports them."""
    block = next(node for node in ast.parse(text).body if isinstance(node, ast.If))
    assert isinstance(block.test, ast.Name)
    assert block.test.id == "TYPE_CHECKING"
    return {
        alias.asname or alias.name: str(node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_public_names_are_complete_and_typed() -> None:
    assert len(anyrank.__all__) == len(set(anyrank.__all__))  # the linter has them sorted
    assert set(anyrank.__all__) == {*anyrank.HOMES, "__version__"}
    typed = find_typed_names((SRC / "anyrank/__init__.py").read_text(encoding="utf-8"))
    assert typed == {**anyrank.HOMES, "integrations": "anyrank"}
    assert dir(anyrank) == sorted(anyrank.__all__)


@pytest.mark.parametrize("name", anyrank.__all__)
def test_public_name_can_be_imported(name: str) -> None:
    assert getattr(anyrank, name).__doc__
    values = ("__version__", "ALONE", "CUT")
    assert name in values or getattr(anyrank, name).__name__ == name


def test_no_module_hides_a_public_name() -> None:
    taken = {path.stem for path in (SRC / "anyrank").iterdir()}
    assert taken & set(anyrank.__all__) == set()


def test_a_misspelled_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'anyrank' has no attribute 'laod'"):
        _ = anyrank.laod


# -- sizes, names and text ------------------------------------------------------------------------

FOLDERS = ("src", "tests", "docs", "benchmarks", "examples", ".ci")
TEXT = {
    ".cfg",
    ".json",
    ".md",
    ".py",
    ".sh",
    ".svg",
    ".toml",
    ".txt",
    ".typed",
    ".yaml",
    ".yml",
    "",
}
# Folders of one machine, and hosts of package registries: neither works for somebody else.
FOREIGN = re.compile(
    r"(?<![\w./~$}-])/(?:root|home|work|Users|opt)/\w"
    r"|pypi[.]org|pythonhosted[.]org|npmjs[.]org|download[.]pytorch[.]org|deb[.]debian[.]org"
)


def list_tracked() -> list[Path]:
    """The files that git knows; none outside of a clone, as in an unpacked sdist."""
    if not (ROOT / ".git").exists():
        return []
    # A clone of another user is as good.
    line = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    listed = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    found = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert found
    return found


def list_texts() -> list[Path]:
    """The text files of the repository: what git knows, and what is new in a folder of it.

    A stray note at the root, or a core dump, is somebody's own.
    """
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    files = {*list_tracked(), *inside}
    return sorted(path for path in files if path.suffix in TEXT and path.is_file())


def test_nothing_points_at_one_machine_or_registry() -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in list_texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if FOREIGN.search(line)
    ]
    assert lines == []


@pytest.mark.parametrize("text", ["cd /{}home/me", '"/{}opt/x/y"', "https://pypi{}.org/simple"])
def test_a_foreign_path_is_found(text: str) -> None:
    assert FOREIGN.search(text.format(""))
    assert not FOREIGN.search(text.format("-"))
    assert not FOREIGN.search("https://example.com/home/me, runs/work/x and ~/work/y")


def test_python_is_ascii() -> None:
    files = [path for path in list_texts() if path.suffix == ".py"]
    assert [str(path) for path in files if not path.read_bytes().isascii()] == []


def test_modules_are_short_and_have_plain_names() -> None:
    sizes = {path: len(path.read_bytes().splitlines()) for path in SRC.rglob("*.py")}
    assert {str(path): size for path, size in sizes.items() if size > 500} == {}
    public = ("__init__", "__main__")
    parts = {part for path in sizes for part in path.relative_to(SRC).with_suffix("").parts}
    assert [part for part in parts if part.startswith("_") and part not in public] == []


@pytest.mark.parametrize(("name", "limit"), [("README.md", 120), ("CONTRIBUTING.md", 290)])
def test_front_pages_are_short(name: str, limit: int) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= limit


def test_no_other_knob_is_read_or_documented() -> None:
    pages = [path for path in list_texts() if path.is_relative_to(ROOT / "docs")]
    texts = [page.read_text(encoding="utf-8") for page in [*pages, ROOT / "README.md"]]
    named = re.findall(r"\bANYRANK_\w+", "\n".join([*read_sources(SRC).values(), *texts]))
    commands = {settings.PEERS_FOLDER}
    assert set(named) == {knob.name for knob in settings.KNOBS} | commands


# -- dependencies ---------------------------------------------------------------------------------


def canonical(name: str) -> str:
    """A package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", name)[0]).lower()


def test_every_dependency_has_an_exact_version_and_a_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [name for group in groups for name in group]
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    assert {canonical(name) for name in wanted} - {canonical(pin) for pin in pins} == set()
    bare = [name for name in wanted if not re.search(re.escape(f'"{name}"') + r",? +# \w", text)]
    assert bare == []


def test_the_root_holds_what_it_should() -> None:
    tracked = [path.relative_to(ROOT).parts for path in list_tracked()]
    if not tracked:
        pytest.skip("this is no clone, in which git knows the files")
    assert {parts[0] for parts in tracked if len(parts) > 1} == set(FOLDERS)


def test_a_stray_file_at_the_root_is_nobodys_business(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.house.test_house.ROOT", tmp_path)
    (tmp_path / "note.md").write_text("see /" + "home/me")
    (tmp_path / "core").write_bytes(b"\x7fELF\xff")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "new.py").touch()
    assert list_texts() == [tmp_path / "src/new.py"]
