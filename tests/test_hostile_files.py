"""Files and folders made to harm: no code in them is executed, no address in them is called, and
names and faults of a model's folder end in one plain line, from every command."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.faults import refusal
from tests.report.made import classifier
from tests.runs import ROOT, edit_json, recipe, slow_but, start
from toolkit.config import ModelSettings
from toolkit.data.labels import Labels
from toolkit.data.read import read_hub
from toolkit.data.write import without_formula
from toolkit.errors import escape_controls, printable
from toolkit.evaluation.saved_model import SavedModel
from toolkit.models.classifier import load_saved_classifier
from toolkit.pretrained import load_plain_tokenizer
from toolkit.report.statistics import scores_of

LABELS = Labels("single_label_classification", ("neg", "pos"), ("label",))


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
    """Beside it lies rows.csv."""
    rows = [f"a film {number},neg\na book {number},pos\n" for number in range(10)]
    (tmp_path / "rows.csv").write_text("".join(["text,label\n", *rows]))
    return classifier(tiny_model, tmp_path / "model", LABELS)


def test_a_config_that_names_code_on_the_hub_is_not_obeyed(model: Path) -> None:
    edit_json(model / "config.json", attn_implementation="kernels-community/flash-attn")
    loaded = load_saved_classifier(ModelSettings(model_name_or_path=str(model)))
    assert loaded.config._attn_implementation == "sdpa"
    assert loaded(input_ids=loaded.dummy_inputs["input_ids"]).logits.shape[1] == 2


def test_a_data_set_that_names_an_address_is_refused(tmp_path: Path) -> None:
    files = "  data_files:\n  - split: train\n    path: https://localhost:9/secret.csv\n"
    config = f"---\nconfigs:\n- config_name: default\n{files}---\n"
    (tmp_path / "README.md").write_text(config)
    refusal(read_hub, str(tmp_path), says=[str(tmp_path), "secret.csv"])


_EVIL = "import posix\nposix.close(posix.open({marker!r}, posix.O_CREAT | posix.O_WRONLY))\n"
SETTINGS = "--model_name_or_path . --train_file ../rows.csv --max_steps 1 --report_to none".split()
SETTINGS += "--global_batch_size 8 --per_device_batch_size 4 --mixed_precision no".split()
RECIPE = [str(ROOT / "recipes" / "cls.py"), *SETTINGS, "--output_dir", "OUT"]
DDP, ZERO2 = (["--config_file", f"accelerate_configs/{name}.yaml"] for name in ("ddp", "zero2"))
PREDICT = ["toolkit", "predict", ".", "../rows.csv"]
COMMANDS: dict[str, list[str]] = {
    "convert": ["toolkit", "convert", ".", "OUT"],
    "predict, zero2": [*PREDICT, *ZERO2],
    "recipe, zero2": [*RECIPE, *ZERO2],
    "sweep": ["toolkit", "sweep", *RECIPE, "--seeds", "2"],
    "verify": ["toolkit", "verify", *RECIPE, *DDP, "--max_steps", "2"],
    "to-bigbird": ["toolkit", "to-bigbird", ".", "OUT"],
    "prepare": ["toolkit", "prepare", "cls", *SETTINGS],
    "doctor": ["toolkit", "doctor"],
}


@pytest.mark.parametrize("name", slow_but(COMMANDS, "convert", "predict, zero2"))
def test_no_python_file_is_executed(name: str, model: Path, tmp_path: Path) -> None:
    """Whatever module is imported first by whatever child: the folder has a file of that name."""
    installed = {"torch", "numpy", "accelerate", "transformers", "toolkit", "yaml"}
    for module in sys.stdlib_module_names | installed | {"sitecustomize", "usercustomize"}:
        marker = str(tmp_path / f"executed-{module}")
        (model / f"{module}.py").write_text(_EVIL.format(marker=marker))
    words = [str(tmp_path / "out") if word == "OUT" else word for word in COMMANDS[name]]
    program = words if words[0] == "toolkit" else [sys.executable, *words]
    done = start(program, env={"PYTHONPATH": str(ROOT)}, cwd=model)
    assert sorted(path.name for path in tmp_path.glob("executed-*")) == [], done.err[-2000:]
    done.succeeded()


def test_a_recipe_imports_what_lies_beside_it(tmp_path: Path) -> None:
    """In the launcher's children, too."""
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    script = "import beside\nfrom toolkit import launch\nlaunch.run(lambda: print(beside.VALUE))\n"
    (tmp_path / "mine.py").write_text(script)
    done = start([sys.executable, tmp_path / "mine.py", *DDP]).succeeded()
    assert done.out.split() == ["5", "5"]


def test_a_token_without_a_row_in_the_model(model: Path, tmp_path: Path) -> None:
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    added = {**tokenizer["added_tokens"][-1], "id": 99_999, "content": "zzfilm"}
    tokenizer["added_tokens"].append(added)
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    predict = ["toolkit", "predict", model, tmp_path / "rows.csv"]
    start(predict).says_in_one_line("the tokenizer has a token")


def test_characters_that_cannot_be_shown_or_are_none(model: Path) -> None:
    """A terminal without Unicode ends nothing: only what it cannot show is written otherwise."""
    words = [sys.executable, "-m", "toolkit", "predict", model, "--text"]
    for encoding in ("gbk", "ascii"):
        done = start([*words, "fun 😀 é"], env={"PYTHONIOENCODING": encoding}).succeeded()
        assert json.loads(done.out)["prediction"] in ("neg", "pos")
    start([*words, "caf\udce9"]).says_in_one_line("row 1", "no Unicode")


ESCAPE = "\x1b]52;c;ZXZpbA==\x07\x9b2J\u202eok"


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
    shown = "好\té\n👨\u200d👩 \\u000d\\u0085\\u2066"
    assert escape_controls("好\té\n👨\u200d👩 \r\x85\u2066") == shown
    assert printable("a\nb \x1b[2J") == "a b [2J"
    formulas = ["=1+1", "+cmd|' /C calc'!A0", "@SUM(1)", "-2+3", "\t=1", " =1", "＝1", "=\n1"]
    assert [without_formula(cell) for cell in formulas] == [f"'{cell}" for cell in formulas]
    texts = ["-1", "+0.5", "-", "a=b", "", None, -2.5, ["=1"]]
    assert [without_formula(cell) for cell in texts] == texts


TWICE = {str(place): f"{place // 2}" for place in range(300_000)}
# a change of config.json -> part of the line
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"id2label": {"0": "a", "1": None}}, "without a name"),
    ({"id2label": {"0": "a", "1": " "}}, "without a name"),
    ({"id2label": TWICE}, "several outputs"),
    ({"id2label": {"0": "a", "1": "\ud83d"}}, "without a name"),
    ({"id2label": {"0": "a", "1": ["b"]}}, "without a name"),
    ({"id2label": {"0": "a", "2": "b"}}, "needs a name for 0 to 1"),
    ({"problem_type": "weird"}, "problem_type 'weird'"),
]


def test_a_config_whose_predictions_name_no_class(model: Path) -> None:
    config = (model / "config.json").read_text(encoding="utf-8")
    for changes, says in CONFIGS:
        (model / "config.json").write_text(config, encoding="utf-8")
        edit_json(model / "config.json", **changes)
        refusal(SavedModel, str(model), says=[str(model), says])
    for key in ("label", "prediction"):
        lines = [{"id": 0, "label": "neg", "prediction": "pos", key: "zzz"}]
        says = ["predictions.jsonl", "zzz"]
        refusal(scores_of, lines, LABELS.problem_type, LABELS.names, says=says)


NAMES = {str(place): f"n{place}" for place in range(999)}
PANIC = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
NOTHING = {"type": "FixedLength", "length": 0}
# a file and its changes -> what the line says
FOLDERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "more names than outputs": ("config.json", {"id2label": NAMES}, "other sizes"),
    "panics when loaded": ("tokenizer.json", {"normalizer": PANIC}, "cannot be loaded"),
    "no length": ("tokenizer_config.json", {"model_max_length": "x"}, "cannot be loaded"),
    "no columns": ("tokenizer_config.json", {"training_columns": {"delimiter": {}}}, "delimiter"),
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
    file, settings = model / "model.safetensors", ModelSettings(model_name_or_path=str(model))
    weights = load_file(file)
    other = {name.replace("classifier.", "fc."): tensor for name, tensor in weights.items()}
    save_file(other, file, {"format": "pt"})
    refusal(load_saved_classifier, settings, says=["fc.weight", "classifier.weight"])
    save_file(weights, file, {"format": "pt"})
    assert load_saved_classifier(settings).classifier.weight.equal(weights["classifier.weight"])
