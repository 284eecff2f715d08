"""The house of docs/reading.md: floors without an upward arrow, recipes that know no strategy, light imports."""

import ast
import functools
import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.runs import ROOT, start

PACKAGE = ROOT / "toolkit"
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
MODULES = sorted(PACKAGE.rglob("*.py"))

# part of the toolkit -> its floor; an import may go down or stay on its floor
FLOORS = {
    "toolkit": 0,  # the package itself
    "errors": 0, "utils": 0, "config": 0, "launch": 0, "demo": 0, "pretrained": 0,
    "data": 1, "models": 1, "objective": 1, "checkpoint": 1,
    "training": 2, "evaluation": 2,
    "report": 3, "run": 3, "api": 3, "conversion": 3,
    "features": 4,
    "commands": 5, "cli": 5, "__main__": 5, "recipes": 5,
}  # fmt: skip

STRATEGY_WORDS = (
    r"ddp|fsdp2?|zero[123]?|deepspeed|ds|stages?|offload|megatron|nccl|gloo|mpi|torchrun"
    r"|all_?reduce|world_size|local_rank"
)


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


KNOWN = {name_of(path): path for path in MODULES}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path, at_run_time: bool = False) -> list[tuple[int, str]]:
    """(line, module) of every import, inside functions too; of `from a import b` also `a.b` where that is a module."""
    imports: list[tuple[int, str]] = []

    def visit(node: ast.AST) -> None:
        if at_run_time and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            imports.extend((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                imports.append((node.lineno, inner if inner in KNOWN else str(node.module)))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree_of(path))
    return imports


def part_of(module: str) -> str:
    """`toolkit.data.read` -> `data`; `recipes`; nothing for modules of others."""
    parts = module.split(".")
    if parts[0] == "recipes" or module == "toolkit":
        return parts[0]
    return parts[1] if parts[0] == "toolkit" else ""


def feature_of(module: str) -> str:
    """`toolkit.features.sweep.command` -> `sweep`; nothing for what is no feature."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["toolkit", "features"] and len(parts) > 2 else ""


CONVERTERS = ("toolkit.api", "toolkit.commands.convert")
SIDE_BY_SIDE = ("data", "models", "objective", "checkpoint")


def test_no_import_goes_up_or_to_the_side() -> None:
    """To another feature, to conversion, or between data, models, objective and checkpoint."""
    faults = []
    for path in [*MODULES, *RECIPES]:
        here, feature = part_of(name_of(path)), feature_of(name_of(path))
        for line, module in imports_of(path):
            part = part_of(module)
            to_the_side = here in SIDE_BY_SIDE and part in SIDE_BY_SIDE and part != here
            to_a_feature = feature and feature_of(module) not in (feature, "")
            is_user = here == "conversion" or name_of(path) in CONVERTERS
            to_conversion = part == "conversion" and not is_user
            upward = FLOORS.get(part, -1) > FLOORS[here]
            if upward or to_the_side or to_a_feature or to_conversion:
                faults.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
        if here in SIDE_BY_SIDE:  # in strings
            others = "|".join(set(SIDE_BY_SIDE) - {here})
            named = re.findall(rf"toolkit\.(?:{others})\b", path.read_text(encoding="utf-8"))
            faults += [f"{path.relative_to(ROOT)} names {module}" for module in named]
    assert faults == []


def test_the_core_names_no_feature_and_features_are_light_to_find() -> None:
    """Not in strings either; only a recipe may import one."""
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        assert feature_of(name_of(path)) or not re.search(r"toolkit\.features\.\w", text), path
    folders = {path.parent for path in (PACKAGE / "features").glob("*/__init__.py")}
    assert folders == {path.parent for path in MODULES if path.name == "feature.py"}


def test_no_module_imports_itself_through_others() -> None:
    graph = {}
    for name, path in KNOWN.items():
        modules = {module for _, module in imports_of(path, at_run_time=True)}
        graph[name] = (modules & KNOWN.keys()) - {name}
    assert sum(map(len, graph.values())) > 50  # the graph is not empty
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_short_shows_its_loop_and_holds_no_word_of_a_strategy(path: Path) -> None:
    """Whole words, `_` counted as a space; the names of config files in command lines are allowed."""
    text = path.read_text(encoding="utf-8")
    plain = re.sub(r"(accelerate_configs|ds_configs)/\w+\.(yaml|json)", "", text).lower()
    assert re.findall(rf"(?<![a-z])(?!zero_grad)(?:{STRATEGY_WORDS})(?![a-z0-9])", plain) == []
    assert len(text.splitlines()) <= 150
    loops = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.For)]
    assert any("backward" in ast.unparse(node) for node in loops)


def test_light_modules_import_no_torch() -> None:
    """Nor does `toolkit --help`, or `import toolkit`, which offers all names of docs/api.md."""
    code = """
import sys, toolkit.errors, toolkit.utils.files, toolkit.config, toolkit.launch, toolkit.demo, toolkit.cli
assert "Run" in dir(toolkit)
sys.argv = ["toolkit", "--help"]
try: toolkit.cli.main()
except SystemExit as left: assert not left.code
sys.exit(" ".join({"torch", "transformers", "accelerate", "deepspeed"} & set(sys.modules)) or 0)
"""
    done = start([sys.executable, "-c", code])
    assert (done.code, done.err) == (0, "")
    assert "usage: toolkit" in done.out


def test_a_run_imports_only_what_it_needs(tiny_model: Path, reviews: Path, tmp_path: Path) -> None:
    """In one process, on tokens that are made: no DeepSpeed, no `datasets`, no BigBird, no teacher. And the garbage
    collector, which looks rarely until everything is imported, then looks as always, and not at that."""
    data = ["--train_file", str(reviews), "--model_name_or_path", str(tiny_model)]
    start(["toolkit", "prepare", *data]).succeeded()
    words = [*data, "--max_steps", "1", "--report_to", "none", "--output_dir", str(tmp_path)]
    code = """
import gc, runpy, sys
sys.argv[0], usual = "recipes/cls.py", gc.get_threshold()
runpy.run_path("recipes/cls.py", run_name="__main__")
assert gc.get_freeze_count() > 100_000 and gc.get_threshold() == usual
unneeded = {"deepspeed", "datasets", "transformers.models.big_bird.modeling_big_bird",
            "toolkit.features.distillation.teacher"}
sys.exit(" ".join(unneeded & set(sys.modules)) or 0)
"""
    start([sys.executable, "-c", code, *words]).succeeded()
    assert (tmp_path / "report.html").is_file()
