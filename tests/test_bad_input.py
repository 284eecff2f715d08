"""Bad input ends at once: one clear line from one process, an exit code that is not 0, nothing overwritten."""

from pathlib import Path

import pytest

from tests.runs import recipe, slow_but

GOOD = "text,label\n" + "a fine film,pos\na dull film,neg\n" * 12
# case -> (the training file, settings, parts of the line); each fault of a file: tests/data
CASES: dict[str, tuple[str, str, list[str]]] = {
    "missing file": ("", "--train_file no.csv", ["no.csv does not exist"]),
    "missing column": (GOOD, "--text_column txt", ["no column 'txt'", "did you mean text?"]),
    "no label column": (GOOD.replace("label", "mark", 1), "", ["--label_column"]),
    "one class only": (GOOD.replace("neg", "pos"), "", ["holds pos only"]),
    "unseen label": (
        GOOD, "--validation_file {folder}/new.csv",
        ["new.csv, row 2", "label 'posi' does not occur in training", "did you mean pos?"]),
    "empty text": (GOOD + '" ",pos\n', "", ["empty in 1 of 25 rows (rows 25)", "--drop_empty_text"]),
    "wrong model": (GOOD, "--model_name_or_path /no/such", ["model /no/such", "cannot be loaded"]),
    "max_length": (GOOD, "--max_length 4096", ["--max_length 4096", "131 positions"]),
    "wrong settings": (GOOD, "--seed x --batchsize 9", ["2 faults", "--seed 'x'", "--batchsize"]),
    "metric": (GOOD, "--metric_for_best_model f1", ["--metric_for_best_model", "f1_macro"]),
    "tracker": (GOOD, "--report_to tensorbord", ["did you mean tensorboard?"]),
}  # fmt: skip
DDP = ["--config_file", "accelerate_configs/ddp.yaml"]
WAYS: dict[str, list[str]] = {name: [] for name in CASES}
WAYS |= {"unseen label, two processes": DDP, "wrong settings, two processes": DDP}


@pytest.mark.parametrize("name", slow_but(WAYS, *list(WAYS)[:-1]))
def test_one_line(name: str, tmp_path: Path, tiny_model: Path) -> None:
    content, words, says = CASES[name.partition(",")[0]]
    (tmp_path / "train.csv").write_text(content)
    (tmp_path / "new.csv").write_text("text,label\nfine,pos\nfiner,posi\n")
    arguments = ["--train_file", tmp_path / "train.csv", "--model_name_or_path", tiny_model]
    more = words.format(folder=tmp_path).split()
    done = recipe(*WAYS[name], *arguments, "--output_dir", tmp_path / "run", *more)
    done.says_in_one_line(*says)
    assert done.code == 1
    assert not (tmp_path / "run").exists()
