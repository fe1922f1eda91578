"""Layers of the source: package order, import circles, names and sizes of files."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "saccade"

LAYERS = [
    *("errors", "wording", "options", "files", "model_spec", "profile", "resumable", "environment", "cpu"),
    *("pocket", "inputs", "data", "tree", "output", "target_model", "loading", "lora", "schema", "grammar"),
    *("processors", "verify", "draft", "checkpoints", "engine", "methods", "stream", "running_batch", "chat"),
    *("resolution", "vlm", "hf", "ray_cluster", "serve", "theory", "memory_plan", "bench", "jobs", "distill"),
    *("train", "evaluators", "cli"),
]
"""Packages and modules of `saccade`; each imports only from itself and from those before it."""

CIRCLES: tuple[set[str], ...] = ()
"""Circles of TYPE_CHECKING and in-function imports that remain."""

NAMESAKES = {
    "batch.py": "running batch; command",
    "chat.py": "public class; command",
    "dream.py": "head; its objective",
    "peagle.py": "head; its released layout; its objective",
    "registry.py": "heads; methods",
}
"""File names that occur more than once, with what each file is about."""

PARTS = {
    "cli": (("cli",), 2_403),
    "serve": (("serve",), 5_924),
    "training": (("train", "distill"), 4_966),
    "measuring": (("bench", "theory", "memory_plan"), 4_640),
    "jobs": (("jobs", "data", "ray_cluster"), 2_392),
    "checkpoints": (("checkpoints", "evaluators"), 1_212),
    "pocket": (("pocket",), 1_455),
}
"""Parts around the core: their packages, and the most lines that these have together."""
CORE = 29_104
"""Most lines of everything else, which imports none of the parts."""
TESTS, TOOLS = 54_471, 11_140
"""Most lines of the tests, and of tools and benchmarks together."""
TOKENS = 11.05
"""Most tokens of an average line of code outside of the command line, so that lines are not saved by dense writing."""
DOORS = {"draft_dtype": 3, "num_frames": 9}
"""Most files that name a parameter: elsewhere it travels in the dataclass that declares it."""
EDGES = {("resolution", "pocket")}
"""Imports of a part by the core: the built-in pair is a drafter's name."""


@dataclass(frozen=True)
class Import:
    """An import of a module of the package; ``late`` for those under TYPE_CHECKING or inside a function."""

    importer: str
    imported: str
    late: bool


def modules(root: Path) -> dict[str, Path]:
    """Files of a package by module name; a package's own ``__init__`` has the package's name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(root: Path) -> list[Import]:
    """All imports between the modules of a package, ``from package import module`` resolved to the module."""
    known = modules(root)
    found = []
    for name, path in known.items():
        for target, late in _imported(ast.parse(path.read_text(encoding="utf-8")), late=False):
            while target and target not in known:
                target = target.rpartition(".")[0]
            if target and target != name:
                found.append(Import(name, target, late))
    return found


def _imported(node: ast.AST, late: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, late) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, "relative imports are not used here"
            yield from ((f"{child.module}.{alias.name}", late) for alias in child.names)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _imported(child, late or inside or typing)


def upward(root: Path, layers: list[str]) -> dict[tuple[str, str], list[str]]:
    """Imports against the order, by importing and imported layer; its ``__init__`` and ``__main__`` are free."""
    place = {name: number for number, name in enumerate(layers)}
    found = defaultdict(list)
    for entry in imports(root):
        if entry.importer in (root.name, f"{root.name}.__main__"):
            continue
        ours, theirs = ([*name.split("."), "__init__"][1] for name in (entry.importer, entry.imported))
        if (ours != layers[-1]) if theirs == "__init__" else place[theirs] > place[ours]:
            found[ours, theirs].append(f"{entry.importer} imports {entry.imported}")
    return dict(found)


def circles(root: Path, *, late: bool) -> list[frozenset[str]]:
    """Sets of modules that import each other, a package's imports of its own modules left out.

    Args:
        late: count imports under TYPE_CHECKING and inside functions, too.
    """
    graph: dict[str, set[str]] = {name: set() for name in modules(root)}
    for entry in imports(root):
        own = entry.imported.startswith(f"{entry.importer}.")
        if not own and (late or not entry.late):
            graph[entry.importer].add(entry.imported)
    reach = {name: _reachable(graph, name) for name in graph}
    found = {frozenset(b for b in reach[a] if a in reach[b]) for a in graph if a in reach[a]}
    return sorted(found, key=sorted)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def namesakes(root: Path) -> dict[str, list[str]]:
    """File names that occur more than once, apart from ``__init__.py``."""
    found = defaultdict(list)
    for path in root.rglob("*.py"):
        found[path.name].append(str(path.relative_to(root)))
    return {name: sorted(paths) for name, paths in found.items() if len(paths) > 1 and name != "__init__.py"}


def lines(root: Path) -> int:
    """Lines of all Python files below a folder, or of one file."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in _files(root))


_CODE = (tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING)


def _outside_f_strings(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """Tokens with every f-string as one string, as Python 3.11 has it; later ones look into them."""
    depth = 0
    for token in tokens:
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START" and not depth:
            yield token._replace(type=tokenize.STRING)
        depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        if not depth and kind != "FSTRING_END":
            yield token


def density(root: Path, without: str = "") -> float:
    """Tokens a line of code; imports, comments, docstrings and a package left out."""
    tokens, used = 0, 0
    for path in _files(root):
        if without and path.is_relative_to(root / without):
            continue
        text = path.read_text(encoding="utf-8")
        prose = {line for node in ast.walk(ast.parse(text)) for line in _prose(node)}
        every = _outside_f_strings(tokenize.generate_tokens(io.StringIO(text).readline))
        code = [token for token in every if token.type in _CODE and token.start[0] not in prose]
        tokens += len(code)
        used += len({token.start[0] for token in code})
    return tokens / used


def _files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py")) if root.is_dir() else [root]


def _prose(node: ast.AST) -> range:
    """Line numbers of an import, or of a string that stands alone."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    if is_text or isinstance(node, ast.Import | ast.ImportFrom):
        return range(node.lineno, (node.end_lineno or 0) + 1)
    return range(0)


def class_names(root: Path) -> dict[str, list[str]]:
    """Public names of classes that occur more than once, with their modules."""
    found = defaultdict(list)
    for name, path in modules(root).items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    return {name: places for name, places in found.items() if len(places) > 1}


def foreign(root: Path, package: str) -> list[str]:
    """Modules that import a package of the repository that is not installed."""
    found = []
    for name, path in modules(root).items():
        targets = (target for target, _ in _imported(ast.parse(path.read_text(encoding="utf-8")), late=False))
        if any(target.split(".")[0] == package for target in targets):
            found.append(name)
    return found


def test_every_package_has_its_place_in_the_order() -> None:
    assert {name.split(".")[1] for name in modules(SOURCE) if "." in name} == {*LAYERS, "__main__"}


def test_no_package_imports_from_a_later_one() -> None:
    assert not upward(SOURCE, LAYERS), "move the shared part to an earlier package"


def test_no_modules_import_each_other() -> None:
    assert not circles(SOURCE, late=False)


def test_no_modules_name_each_other_in_late_imports() -> None:
    found = [{name.removeprefix("saccade.") for name in circle} for circle in circles(SOURCE, late=True)]
    assert not [circle for circle in found if not any(circle <= known for known in CIRCLES)]


def test_no_file_name_occurs_twice() -> None:
    assert not {name: paths for name, paths in namesakes(SOURCE).items() if name not in NAMESAKES}


def _place(package: str) -> Path:
    folder = SOURCE / package
    return folder if folder.is_dir() else folder.with_suffix(".py")


@pytest.mark.parametrize("part", PARTS)
def test_a_part_keeps_its_budget_of_lines(part: str) -> None:
    packages, most = PARTS[part]
    assert sum(lines(_place(package)) for package in packages) <= most


def test_core_tests_and_tools_keep_their_budgets_of_lines() -> None:
    around = sum(lines(_place(package)) for packages, _ in PARTS.values() for package in packages)
    assert lines(SOURCE) - around <= CORE
    assert lines(SOURCE.parents[1] / "tests") <= TESTS
    assert sum(lines(SOURCE.parents[1] / name) for name in ("tools", "benchmarks")) <= TOOLS


def test_lines_are_not_dense() -> None:
    assert density(SOURCE, without="cli") <= TOKENS


@pytest.mark.parametrize("name", DOORS)
def test_a_parameter_travels_in_its_dataclass(name: str) -> None:
    tokens = {path: tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline) for path in _files(SOURCE)}
    named = [path.name for path, every in tokens.items() if any(token.string == name for token in every)]
    assert len(named) <= DOORS[name], named


def test_the_core_imports_no_part_around_it() -> None:
    around = {package for packages, _ in PARTS.values() for package in packages}
    found = set()
    for entry in imports(SOURCE):
        ours, theirs = ([*name.split("."), "__init__"][1] for name in (entry.importer, entry.imported))
        if ours not in around and ours not in ("__init__", "__main__") and theirs in around:
            found.add((ours, theirs))
    assert found == EDGES


def test_tests_of_the_core_import_no_part_around_it() -> None:
    around = {package for packages, _ in PARTS.values() for package in packages} - {"pocket"}
    tests = SOURCE.parents[1] / "tests"
    found = set()
    for folder in ("conformance", "draft", "engine", "hf", "inputs", "methods", "target_model", "verify"):
        for path in (tests / folder).rglob("*.py"):
            for name, _ in _imported(ast.parse(path.read_text(encoding="utf-8")), late=False):
                if name.startswith("saccade.") and name.split(".")[1] in around:
                    found.add(f"{path.relative_to(tests)} imports {name}")
    assert not found


def test_a_class_name_has_one_meaning() -> None:
    assert not class_names(SOURCE)


def test_the_package_never_imports_the_repositorys_tools() -> None:
    assert not foreign(SOURCE, "tools")


def test_listed_exceptions_still_exist() -> None:
    """The lists of exceptions only shrink: what no longer needs an entry loses it."""
    found = [{name.removeprefix("saccade.") for name in circle} for circle in circles(SOURCE, late=True)]
    assert all(known in found for known in CIRCLES)
    assert NAMESAKES.keys() <= namesakes(SOURCE).keys()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package ``house`` with the layers ``low``, ``middle`` and ``high``, which obeys every rule."""
    root = tmp_path / "house"
    for path, text in {
        "__init__.py": "from house.high.attic import roof",
        "low.py": "stone = 1",
        "middle/__init__.py": "from house.middle.floor import board",
        "middle/floor.py": "from house.low import stone\nfrom house import low\nboard = 1",
        "high/__init__.py": "",
        "high/attic.py": "import house.middle.floor\nroof = 1",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


ORDER = ["low", "middle", "high"]


def test_a_tree_that_obeys_passes(tree: Path) -> None:
    assert not upward(tree, ORDER)
    assert not circles(tree, late=True)
    assert not namesakes(tree)
    assert not foreign(tree, "tools")


@pytest.mark.parametrize(
    "line",
    [
        "from house.high.attic import roof",
        "from house.high import attic",
        "from house import high",
        "import house.high.attic as top",
        "if TYPE_CHECKING:\n    from house.high.attic import roof",
        "def build():\n    from house.high.attic import roof",
        "class Floor:\n    def build(self):\n        import house.high",
        "try:\n    from house.high import attic\nexcept ImportError:\n    pass",
    ],
)
def test_a_planted_upward_import_is_found(tree: Path, line: str) -> None:
    (tree / "middle" / "floor.py").write_text(line)
    assert list(upward(tree, ORDER)) == [("middle", "high")]


def test_a_planted_import_of_the_public_package_is_found(tree: Path) -> None:
    (tree / "middle" / "floor.py").write_text("import house")
    assert list(upward(tree, ORDER)) == [("middle", "__init__")]


@pytest.mark.parametrize(("line", "at_import"), [("{}", True), ("def f():\n    {}", False)])
def test_a_planted_circle_is_found(tree: Path, line: str, at_import: bool) -> None:
    (tree / "middle" / "wall.py").write_text("from house.middle.floor import board")
    (tree / "middle" / "floor.py").write_text(line.format("from house.middle import wall"))
    circle = frozenset({"house.middle.wall", "house.middle.floor"})
    assert circles(tree, late=True) == [circle]
    assert circles(tree, late=False) == ([circle] if at_import else [])


def test_a_planted_namesake_fragment_and_import_of_tools_are_found(tree: Path) -> None:
    (tree / "high" / "floor.py").write_text("from tools.pocket import saw")
    assert namesakes(tree) == {"floor.py": ["high/floor.py", "middle/floor.py"]}
    assert lines(tree / "high" / "floor.py") == 1
    assert foreign(tree, "tools") == ["house.high.floor"]
