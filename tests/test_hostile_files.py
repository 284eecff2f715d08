"""Files and folders made to harm: no code in them is executed, and no address in them is called."""

import json
import sys
from pathlib import Path

import pytest

from tests.faults import refusal
from tests.report.made import classifier
from tests.runs import ROOT, edit_json, slow_but, start
from toolkit.config import ModelSettings
from toolkit.data.labels import Labels
from toolkit.data.read import read_hub
from toolkit.models.classifier import load_saved_classifier

LABELS = Labels("single_label_classification", ("neg", "pos"), ("label",))


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
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
SETTINGS = ["--model_name_or_path", ".", "--train_file", "rows.csv", "--max_steps", "1", "--report_to", "none",
            "--global_batch_size", "8", "--per_device_batch_size", "4", "--mixed_precision", "no"]  # fmt: skip
RECIPE = [str(ROOT / "recipes" / "cls.py"), *SETTINGS, "--output_dir", "OUT"]
DDP, ZERO2 = (["--config_file", f"accelerate_configs/{name}.yaml"] for name in ("ddp", "zero2"))
PREDICT = ["toolkit", "predict", ".", "rows.csv"]
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
def test_no_python_file_is_executed(name: str, model: Path, tmp_path: Path, reviews: Path) -> None:
    """Whatever module is imported first by whatever child: the folder has a file of that name."""
    rows = reviews.read_text(encoding="utf-8").splitlines(keepends=True)[:21]
    (model / "rows.csv").write_text("".join(rows), encoding="utf-8")
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


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_a_token_without_a_row_in_the_model(command: str, model: Path, tmp_path: Path) -> None:
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    added = {**tokenizer["added_tokens"][-1], "id": 99_999, "content": "zzfilm"}
    tokenizer["added_tokens"].append(added)
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    (tmp_path / "rows.csv").write_text("text,label\na film,neg\n")
    words = ["toolkit", command, model, tmp_path / "rows.csv"]
    if command == "evaluate":
        words += ["--output_dir", tmp_path / "out"]
    start(words).says_in_one_line("the tokenizer has a token")


def test_characters_that_cannot_be_shown_or_are_none(model: Path) -> None:
    """A terminal without Unicode ends nothing: only what it cannot show is written otherwise."""
    words = [sys.executable, "-m", "toolkit", "predict", model, "--text"]
    for encoding in ("gbk", "ascii"):
        done = start([*words, "fun 😀 é"], env={"PYTHONIOENCODING": encoding}).succeeded()
        assert json.loads(done.out)["prediction"] in ("neg", "pos")
    start([*words, "caf\udce9"]).says_in_one_line("row 1", "no Unicode")
