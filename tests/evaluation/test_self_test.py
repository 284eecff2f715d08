"""Seventh promise: a model folder proves itself. Whatever makes it say something else is found, nothing else is."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForTokenClassification,
    EncoderDecoderModel,
)

import toolkit
from tests import inputs
from tests.architectures import ARCHITECTURES, make_architecture
from tests.faults import refusal
from tests.report.made import save_columns
from tests.runs import edit_json, failed, start, train
from toolkit.checkpoint.model_folder import write_length
from toolkit.config import ModelSettings
from toolkit.data.labels import Labels
from toolkit.data.tokenizer import load_tokenizer
from toolkit.evaluation import self_test
from toolkit.evaluation.saved_model import SavedModel
from toolkit.evaluation.self_test import (
    FILE,
    check_folder,
    check_self_test,
    load_plainly,
    write_self_test,
)
from toolkit.models.classifier import load_classifier

LABELS = Labels("single_label_classification", ("bad", "fine", "good"), ("label",))


def save_classifier(source: Path, folder: Path, head: float = 1.0, labels: Labels = LABELS) -> Path:
    """`source` with a new head, of weights `head` times as large, and its self test."""
    model_settings = ModelSettings(model_name_or_path=str(source))
    model = load_classifier(model_settings, labels, seed=1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(head if name.startswith("classifier.") else 1)
    model.save_pretrained(folder)
    tokenizer = load_tokenizer(model_settings)
    tokenizer.model_max_length = 100
    tokenizer.save_pretrained(folder)
    write_length(100, folder)
    write_self_test(folder)
    return folder


@pytest.fixture
def saved(sharp_model: Path, tmp_path: Path) -> Path:
    """A copy of a classifier that distinguishes texts."""
    made = inputs.shared("self test", lambda folder: save_classifier(sharp_model, folder, 30.0))
    return Path(shutil.copytree(made, tmp_path / "model"))


def tokenizer_files(**changed: Any) -> Callable[[Path], None]:
    """Both files of a tokenizer, as transformers saves it with other settings."""

    def change(folder: Path) -> None:
        AutoTokenizer.from_pretrained(folder, **changed).save_pretrained(folder)

    return change


def tokenizer_json(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        edit(content)
        (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")

    return change


def swap_words(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["good"], vocabulary["a"] = vocabulary["a"], vocabulary["good"]


def config(**changed: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changed)


def weights(name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = edit(tensors[name]).contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def noise(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 0.01 * torch.randn(tensor.shape, generator=torch.manual_seed(1))


def server_length(tokens: int) -> Callable[[Path], None]:
    return lambda folder: write_length(tokens, folder)


LAYER = "bert.encoder.layer.1.intermediate.dense.weight"
CLASSES = {"0": "fine", "1": "bad", "2": "good"}
HARMFUL = {
    "case": (tokenizer_files(do_lower_case=False), "other tokens"),
    "accents": (tokenizer_files(strip_accents=False), "other tokens"),
    "Chinese is not split": (tokenizer_files(tokenize_chinese_chars=False), "other tokens"),
    "truncation side": (tokenizer_files(truncation_side="left"), "other tokens"),
    "length": (tokenizer_files(model_max_length=60), "60 tokens"),
    "two words": (tokenizer_json(swap_words), "other tokens"),
    "no [CLS]": (tokenizer_json(lambda each: each.update(post_processor=None)), "tokens"),
    "case, of servers": (
        tokenizer_json(lambda each: each["normalizer"].update(lowercase=False)), "tokenizer.json"),
    "names of classes": (config(id2label={"0": "A", "1": "B", "2": "C"}), "its classes are A, B"),
    "order of classes": (config(id2label=CLASSES), "its classes are fine, bad"),
    "what classes mean": (config(problem_type="multi_label_classification"), "problem_type is multi"),
    "length, of servers": (server_length(131), "sentence_bert_config.json"),
    "activation": (config(hidden_act="relu"), "the same weights"),
    "layer norm": (config(layer_norm_eps=0.1), "the same weights"),
    "noise": (weights(LAYER, noise), "other weights"),
    "rows of the head": (weights("classifier.weight", lambda each: each[[1, 0, 2]]), "other weights"),
    "bias of the head": (weights("classifier.bias", lambda each: each + 0.05), "other weights"),
    "a layer of zeros": (weights(LAYER, torch.zeros_like), "other weights"),
    "a layer that is missing": (config(num_hidden_layers=3), "would be random"),
    "its test is damaged": (lambda folder: (folder / FILE).write_text("{}"), "cannot be compared"),
}  # fmt: skip


@pytest.mark.parametrize("change", HARMFUL)
def test_what_changes_its_answers_is_an_error(change: str, saved: Path) -> None:
    edit, says = HARMFUL[change]
    edit(saved)
    refusal(check_folder, str(saved), says=[str(saved), says])
    if "missing" not in change:
        assert check_folder(str(saved), "warn")


def test_each_class_of_many_is_compared(sharp_model: Path, tmp_path: Path) -> None:
    labels = Labels("single_label_classification", tuple(map(str, range(100))), ("label",))
    folder = save_classifier(sharp_model, tmp_path / "model", 30.0, labels)
    weights("classifier.weight", lambda each: each[[0, 2, 1, *range(3, 100)]])(folder)
    refusal(check_folder, str(folder), says=["other weights"])


def test_whoever_knows_why_may_go_on(saved: Path, accelerator: Any, capsys: Any) -> None:
    """Where it is loaded for prediction, too; nothing is said of a folder without the file."""
    assert check_folder(str(saved))
    weights(LAYER, noise)(saved)
    load = SavedModel(str(saved)).load
    refusal(load, accelerator, 100, 8, None, says=["other weights"])
    load(accelerator, 100, 8, None, "off")
    assert capsys.readouterr().err == ""
    load(accelerator, 100, 8, None, "warn")
    assert "other weights" in capsys.readouterr().err
    (saved / FILE).unlink()
    assert not check_folder(str(saved))


def test_a_mask_that_is_ignored_is_found(saved: Path) -> None:
    """Each text alone has none: the texts are compared in a padded batch."""

    class WithoutMask(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, token_type_ids: Any = None, **_: Any) -> Any:
            return loaded.model(input_ids=input_ids)

    loaded = load_plainly(saved)
    refusal(check_self_test, loaded._replace(model=WithoutMask()), says=["the same weights"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_that_were_cast_are_no_fault(dtype: str, saved: Path) -> None:
    """By a script of somebody's, without another self test; nor are those that a run has saved so."""
    model = AutoModelForSequenceClassification.from_pretrained(saved, dtype=getattr(torch, dtype))
    model.save_pretrained(saved)
    assert check_folder(str(saved))
    write_self_test(saved)
    assert check_folder(str(saved))
    config(hidden_act="relu")(saved)
    refusal(check_folder, str(saved), says=["the same weights"])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_alarm(name: str, tmp_path: Path, no_launcher: None) -> None:
    """What transformers alone computes text by text is what `toolkit predict` loads, in fp32 and in bf16."""
    texts = list(pandas.read_csv(inputs.reviews())["text"].str[:60])
    source = make_architecture(name, tmp_path / "source", texts)
    folder = save_classifier(source, tmp_path / "model")
    test = json.loads((folder / FILE).read_text("utf-8"))
    assert test["tokenizer_json"]
    assert sum(bool(case["outputs"]) for case in test["cases"]) >= 5
    for precision in ("no", "bf16"):
        AcceleratorState._reset_state(True)
        SavedModel(str(folder)).load(Accelerator(True, mixed_precision=precision), 100, 8, None)
    # or the next test of this process would be in bf16
    AcceleratorState._reset_state(True)


def test_no_alarm_for_other_tasks(tiny_model: Path, tmp_path: Path) -> None:
    """Outputs for each token, of a vocabulary, of a decoder, of an encoder alone."""
    tagger, titles = tmp_path / "tagger", tmp_path / "titles"
    BertForTokenClassification(AutoConfig.from_pretrained(tiny_model)).save_pretrained(tagger)
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(tiny_model, tiny_model)
    model.config.update({"decoder_start_token_id": 2, "pad_token_id": 0})
    model.save_pretrained(titles)
    encoder, masked = tmp_path / "encoder", tmp_path / "masked"
    shutil.copytree(tiny_model, encoder)
    shutil.copytree(inputs.masked_model(), masked)
    for folder in (tagger, titles, masked, encoder):
        if folder in (tagger, titles):
            AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
        write_self_test(folder)
        assert check_folder(str(folder))
        first = json.loads((folder / FILE).read_text("utf-8"))["cases"][0]
        assert 32 < len(first["outputs"]) <= 500
        file = folder / "model.safetensors"
        name = next(key for key in load_file(file) if key.endswith("layer.1.output.dense.weight"))
        weights(name, noise)(folder)
        refusal(check_folder, str(folder), says=["other weights"])


def test_pairs_are_tested_as_pairs(tiny_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_model, source)
    save_columns(source, text_column="text", text_pair="other")
    folder = save_classifier(source, tmp_path / "model")
    test = json.loads((folder / FILE).read_text("utf-8"))
    assert test["tokenizer_json"]
    assert {len(case["text"]) for case in test["cases"]} == {2}
    assert check_folder(str(folder))


def test_other_instructions_are_no_alarm(saved: Path) -> None:
    """AVX2 in place of what this processor has, from the command line."""
    env = {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    start(["toolkit", "verify", saved], env=env, fresh=True).succeeded()
    config(hidden_act="relu")(saved)
    start(["toolkit", "verify", saved]).says_in_one_line("the same weights", "--self_test warn")


@pytest.mark.parametrize("setting", ["--model_name_or_path", "--teacher"])
def test_a_run_does_not_begin_from_another_model(
    setting: str, saved: Path, sharp_model: Path, tmp_path: Path
) -> None:
    rows = "text,label\n" + "a film,bad\na book,fine\na room,good\n" * 9
    (tmp_path / "rows.csv").write_text(rows)
    words = ["--train_file", tmp_path / "rows.csv", "--max_steps", 1, "--max_length", 20]
    words += ["--model_name_or_path", sharp_model, "--mixed_precision", "no", setting, saved]
    config(hidden_act="relu")(saved)
    assert "the same weights" in failed(*words, "--output_dir", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train(*words, "--output_dir", tmp_path / "run", "--self_test", "warn")


def test_a_model_that_cannot_be_tested_is_converted(
    saved: Path, monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    """It is a line, and the folder is whole but for the test, which would be another model's."""
    monkeypatch.setattr(self_test, "checked_texts", lambda pairs: [])
    toolkit.convert(saved, tmp_path / "out")
    assert "has no self_test.json" in capsys.readouterr().err
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert FILE not in files
    assert files >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_convert_compares_before_it_writes_another(saved: Path, tmp_path: Path) -> None:
    toolkit.convert(saved, tmp_path / "half", dtype="bf16")
    assert check_folder(str(tmp_path / "half"))
    tokenizer_files(do_lower_case=False)(saved)
    refusal(toolkit.convert, saved, tmp_path / "out", says=["other tokens", "--self_test warn"])
    assert not (tmp_path / "out").exists()
    toolkit.convert(saved, tmp_path / "out", self_test="warn")
    assert check_folder(str(tmp_path / "out"))
