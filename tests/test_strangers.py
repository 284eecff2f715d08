"""What a stranger wrote into a model's folder: names and faults of it end in one plain line, from every command."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults import refusal
from tests.report.made import classifier
from tests.runs import edit_json, recipe, start
from toolkit.config import ModelSettings
from toolkit.data.labels import Labels
from toolkit.data.write import without_formula
from toolkit.errors import escape_controls, printable
from toolkit.evaluation.saved_model import SavedModel
from toolkit.pretrained import load_plain_tokenizer
from toolkit.report.statistics import scores_of

LABELS = Labels("single_label_classification", ("neg", "pos"), ("label",))
ESCAPE = "\x1b]52;c;ZXZpbA==\x07\x9b2J\u202eok"


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "rows.csv").write_text("text,label\n" + "a film,neg\na book,pos\n" * 10)
    return classifier(tiny_model, tmp_path / "model", LABELS)


def test_names_reach_a_terminal_and_a_spreadsheet_as_text(model: Path, tmp_path: Path) -> None:
    edit_json(model / "config.json", id2label={"0": ESCAPE, "1": f"={ESCAPE}"}, label2id={})
    rows = tmp_path / "rows.csv"
    words = [["--text", "a film"], [rows]]
    commands = [["toolkit", "predict", model, *each] for each in words]
    commands.append(["toolkit", "evaluate", model, rows, "--output_dir", tmp_path / "out"])
    finished = [start(command) for command in commands]
    train = ["--train_file", rows, "--model_name_or_path", model, "--max_steps", "1"]
    finished.append(recipe(*train, "--report_to", "none", "--output_dir", tmp_path / "run"))
    for done in finished:
        assert not set("\x1b\x07\x9b\u202e").intersection(done.out + done.err)
    assert json.loads(finished[0].out)["prediction"].removeprefix("=") == ESCAPE
    finished[2].says_in_one_line("the classes are \\u001b]52")
    with (tmp_path / "rows.predictions.csv").open(encoding="utf-8", newline="") as file:
        predictions = {row["prediction"] for row in csv.DictReader(file)}
    assert predictions <= {ESCAPE, f"'={ESCAPE}"}


def test_a_text_for_terminals_and_one_for_spreadsheets() -> None:
    assert (
        escape_controls("好\té\n👨\u200d👩 \r\x85\u2066")
        == "好\té\n👨\u200d👩 \\u000d\\u0085\\u2066"
    )
    assert printable("a\nb \x1b[2J") == "a b [2J"
    formulas = ["=1+1", "+cmd|' /C calc'!A0", "@SUM(1)", "-2+3", "\t=1", " =1", "＝1", "=\n1"]
    assert [without_formula(cell) for cell in formulas] == [f"'{cell}" for cell in formulas]
    texts = ["-1", "+0.5", "-", "a=b", "", None, -2.5, ["=1"]]
    assert [without_formula(cell) for cell in texts] == texts


# changes of config.json -> parts of the line
CONFIGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no name": ({"id2label": {"0": "a", "1": None}}, ["id2label", "without a name"]),
    "a blank name": ({"id2label": {"0": "a", "1": " "}}, ["id2label", "without a name"]),
    "one name twice": (
        {"id2label": {str(place): f"{place // 2}" for place in range(300_000)}},
        ["several outputs"],
    ),
    "no Unicode": ({"id2label": {"0": "a", "1": "\ud83d"}}, ["id2label", "without a name"]),
    "a list": ({"id2label": {"0": "a", "1": ["b"]}}, ["id2label", "without a name"]),
    "a gap": ({"id2label": {"0": "a", "2": "b"}}, ["needs a name for 0 to 1"]),
    "no such type": ({"problem_type": "weird"}, ["problem_type 'weird'", "regression"]),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_whose_predictions_name_no_class(case: str, model: Path) -> None:
    changes, says = CONFIGS[case]
    edit_json(model / "config.json", **changes)
    refusal(SavedModel, str(model), says=[str(model), *says])


@pytest.mark.parametrize("key", ["label", "prediction"])
def test_predictions_that_name_no_class(key: str) -> None:
    lines = [{"id": 0, "label": "neg", "prediction": "pos", key: "zzz"}]
    refusal(scores_of, lines, LABELS.problem_type, LABELS.names, says=["predictions.jsonl", "zzz"])


NAMES = {str(place): f"n{place}" for place in range(999)}
PANIC = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
NOTHING = {"type": "FixedLength", "length": 0}
# a file and its changes -> what the line says
FOLDERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "more names than outputs": ("config.json", {"id2label": NAMES}, "other sizes"),
    "panics when loaded": ("tokenizer.json", {"normalizer": PANIC}, "cannot be loaded"),
    "no length": ("tokenizer_config.json", {"model_max_length": "x"}, "cannot be loaded"),
    "no columns": ("tokenizer_config.json", {"training_columns": [1]}, "training_columns"),
    "panics in use": ("tokenizer.json", {"pre_tokenizer": NOTHING}, "cannot be loaded"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_cannot_be_used(case: str, model: Path) -> None:
    file, changes, says = FOLDERS[case]
    edit_json(model / file, **changes)
    edit_json(model / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    command = ["toolkit", "predict", model, "--text", "a"]
    start(command, env={"RUST_BACKTRACE": "0"}).says_in_one_line(says)


def test_a_tokenizer_that_its_folder_does_not_name(tiny_model: Path, tmp_path: Path) -> None:
    """As advised, it loads."""
    folder = classifier(tiny_model, tmp_path / "model", LABELS)
    words = load_plain_tokenizer(str(folder)).convert_ids_to_tokens(range(127))
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    (folder / "tokenizer.json").unlink()
    edit_json(folder / "config.json", model_type="longformer")
    edit_json(folder / "tokenizer_config.json", tokenizer_class=None)
    refusal(load_plain_tokenizer, str(folder), says=['"tokenizer_class": "BertTokenizer"'])
    edit_json(folder / "tokenizer_config.json", tokenizer_class="JiebaTokenizer")
    refusal(load_plain_tokenizer, str(folder), says=["--tokenizer jieba"])
    edit_json(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    assert load_plain_tokenizer(str(folder)).convert_ids_to_tokens(range(127)) == words


def test_a_head_under_another_name(model: Path) -> None:
    """As advised, it loads."""
    from safetensors.torch import load_file, save_file

    from toolkit.models.classifier import load_saved_classifier

    file, settings = model / "model.safetensors", ModelSettings(model_name_or_path=str(model))
    weights = load_file(file)
    other = {name.replace("classifier.", "fc."): tensor for name, tensor in weights.items()}
    save_file(other, file, {"format": "pt"})
    refusal(load_saved_classifier, settings, says=["fc.weight", "classifier.weight"])
    save_file(weights, file, {"format": "pt"})
    assert load_saved_classifier(settings).classifier.weight.equal(weights["classifier.weight"])
