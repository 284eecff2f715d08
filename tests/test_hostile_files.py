"""Files and folders made to harm: downloaded models, data and runs."""

import csv
import gzip
import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest

from tests.faults import Fault, refusal
from tests.report.made import classifier
from tests.runs import ROOT, edit_json, slow_but, start
from toolkit.config import ModelSettings, TextSettings
from toolkit.data.labels import Labels
from toolkit.data.read import read_file, read_hub
from toolkit.features.export.runtimes import ExportedClassifier
from toolkit.features.sweep.command import Sweep
from toolkit.models.classifier import load_saved_classifier

LABELS = Labels("single_label_classification", ("neg", "pos"), ("label",))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return classifier(tiny_model, tmp_path_factory.mktemp("hostile") / "model", LABELS)


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    """A classifier of this test's own."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


def test_a_config_that_names_code_on_the_hub_is_not_obeyed(model: Path) -> None:
    edit_json(model / "config.json", attn_implementation="kernels-community/flash-attn")
    loaded = load_saved_classifier(ModelSettings(model_name_or_path=str(model)))
    assert loaded.config._attn_implementation == "sdpa"
    assert loaded(input_ids=loaded.dummy_inputs["input_ids"]).logits.shape[1] == 2


def test_a_data_set_that_names_an_address_is_refused(tmp_path: Path) -> None:
    config = "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: https://localhost:9/secret.csv\n"
    (tmp_path / "README.md").write_text(f"---\n{config}---\n")
    refusal(read_hub, str(tmp_path), says=[str(tmp_path), "secret.csv"])


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_too_many_columns_are_refused(kind: str, tmp_path: Path, fault: Fault) -> None:
    names = [f"c{number}" for number in range(200_000)]
    path, rows = tmp_path / f"rows.{kind}", ",".join(names) + "\n" + "1," * 199_999 + "1\n"
    path.write_text(rows if kind == "csv" else json.dumps(dict.fromkeys(names, 1)))
    said = refusal(
        lambda: len(read_file(str(path), TextSettings())),
        says=[str(path), "200000 columns", "10000"],
    )
    fault(f"a {kind.upper()} file with 200,000 columns", said)


@pytest.mark.parametrize("name", ["rows.csv.gz", "rows.jsonl.gz", "rows.tsv", "rows.txt"])
def test_a_line_without_an_end_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.data.text_files.MAX_CELL", 5000)
    monkeypatch.setattr(
        "csv.field_size_limit", lambda limit: None
    )  # it would hold for all later tests
    path, content = tmp_path / name, b'{"text": "a"}\n' + b"x" * 6000
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    refusal(
        lambda: len(read_file(str(path), TextSettings())),
        says=[f"{path}, line 2", "5000 characters"],
    )


def test_a_graph_that_takes_all_memory_ends_in_one_line(tmp_path: Path, fault: Fault) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    make, numbers = onnx.helper, onnx.TensorProto
    shape = make.make_tensor("shape", numbers.INT64, [2], [1 << 16, 1 << 30])  # 256 TiB of float32
    node = make.make_node("ConstantOfShape", ["shape"], ["logits"])
    ids = make.make_tensor_value_info("input_ids", numbers.INT64, ["batch", "length"])
    logits = make.make_tensor_value_info("logits", numbers.FLOAT, [None, None])
    graph = make.make_graph([node], "huge", [ids], [logits], [shape])
    onnx.save(
        make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=8),
        tmp_path / "model.onnx",
    )

    def compute() -> None:
        import torch

        ExportedClassifier(tmp_path, None)(input_ids=torch.ones(1, 8, dtype=torch.int64))

    fault("an ONNX graph that wants 256 TiB", refusal(compute, says=["model.onnx"]))


def test_a_journal_of_a_sweep_that_is_none_is_refused(tmp_path: Path, fault: Fault) -> None:
    pytest.importorskip("optuna")
    for content in (pickle.dumps({"a": [1]}), b"[]\n", b'{"op_code": "x"}\n'):
        (tmp_path / "study.journal").write_bytes(content)
        sweep = Sweep(str(ROOT / "recipes" / "cls.py"), [], tmp_path)
        said = refusal(sweep.search, {}, [], 1, says=[str(tmp_path / "study.journal")])
    fault("a sweep's study.journal that is a pickle", said)


_EVIL = "import posix\nposix.close(posix.open({marker!r}, posix.O_CREAT | posix.O_WRONLY))\n"
SETTINGS = ["--model_name_or_path", ".", "--train_file", "rows.csv", "--max_steps", "1", "--report_to", "none",
            "--global_batch_size", "8", "--per_device_batch_size", "4", "--mixed_precision", "no"]  # fmt: skip
RECIPE = [str(ROOT / "recipes" / "cls.py"), *SETTINGS, "--output_dir", "OUT"]
COMMANDS: dict[str, list[str]] = {
    "convert": ["toolkit", "convert", ".", "OUT"],
    "predict, ddp": ["toolkit", "predict", ".", "rows.csv", "--config_file", "accelerate_configs/ddp.yaml"],
    "predict, zero2": ["toolkit", "predict", ".", "rows.csv", "--config_file", "accelerate_configs/zero2.yaml"],
    "predict, one process": ["toolkit", "predict", ".", "rows.csv", "--config_file", "accelerate_configs/single.yaml"],
    "predict": ["toolkit", "predict", ".", "rows.csv"],
    "recipe, zero2": [*RECIPE, "--config_file", "accelerate_configs/zero2.yaml"],
    "recipe, ddp": [*RECIPE, "--config_file", "accelerate_configs/ddp.yaml"],
    "sweep": ["toolkit", "sweep", *RECIPE, "--seeds", "2"],
    "verify": ["toolkit", "verify", *RECIPE, "--config_file", "accelerate_configs/ddp.yaml", "--max_steps", "1"],
    "export": ["toolkit", "export", ".", "OUT", "--to", "onnx", "--validation_file", "rows.csv", "--max_drop", "100"],
    "to-bigbird": ["toolkit", "to-bigbird", ".", "OUT"],
    "prepare": ["toolkit", "prepare", "cls", *SETTINGS],
    "doctor": ["toolkit", "doctor"],
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(COMMANDS, "convert", "predict, zero2"))
def test_no_python_file_there_is_executed(
    name: str, model: Path, tmp_path: Path, reviews: Path, fault: Fault
) -> None:
    """Whatever module is imported first by whatever child: the folder has a file of that name."""
    with reviews.open(newline="") as source, (model / "rows.csv").open("w", newline="") as target:
        csv.writer(target).writerows(
            row for row, _ in zip(csv.reader(source), range(20), strict=False)
        )
    installed = {
        "torch",
        "numpy",
        "accelerate",
        "transformers",
        "toolkit",
        "yaml",
        "sitecustomize",
        "usercustomize",
    }
    for module in sys.stdlib_module_names | installed:
        (model / f"{module}.py").write_text(
            _EVIL.format(marker=str(tmp_path / f"executed-{module}"))
        )
    words = [str(tmp_path / "out") if word == "OUT" else word for word in COMMANDS[name]]
    program = words if words[0] == "toolkit" else [sys.executable, *words]
    done = start(program, env={"PYTHONPATH": str(ROOT)}, cwd=model)
    assert sorted(path.name for path in tmp_path.glob("executed-*")) == [], done.err[-2000:]
    done.succeeded()
    fault(
        f"`{name}` in a folder with files named like Python's modules", "none of them is executed"
    )


def test_a_recipe_imports_what_lies_beside_it(tmp_path: Path) -> None:
    """In the launcher's children, too."""
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    (tmp_path / "mine.py").write_text(
        "import sys\nimport beside\nfrom toolkit import launch\n\n\ndef main():\n    launch.make_accelerator('no')\n"
        "    sys.stdout.write(f'imported {beside.VALUE}\\n')\n\n\nlaunch.run(main)\n"
    )
    command = [
        sys.executable,
        str(tmp_path / "mine.py"),
        "--config_file",
        "accelerate_configs/ddp.yaml",
    ]
    assert start(command).succeeded().out.count("imported 5") == 2
