"""Architectures that people use, each with recipes/cls.py; docs/models.md says what was measured."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

import toolkit
from tests.architectures import ARCHITECTURES, make_architecture
from tests.faults import refusal
from tests.jobs_worker import run_jobs
from tests.runs import WAYS, edit_json, lines_of, losses_of
from toolkit.cli import build_parser
from toolkit.config import ModelSettings
from toolkit.data.labels import Labels
from toolkit.data.tokenizer import load_tokenizer
from toolkit.features.predict.command import predict_file
from toolkit.models.classifier import load_classifier, load_saved_classifier

# FEW: in the test that is not slow
EVERY = tuple(ARCHITECTURES)
FEW = ("ALBERT", "GTE", "Qwen3, LoRA")
# each way resumes the checkpoints of the one before it
SHARDED = {"ddp x2": "single", "zero2 x2": "ddp x2", "zero3 x2": "zero2 x2", "fsdp2 x2": "zero3 x2"}
COMMON = ["--text_column", "text", "--label_column", "label", "--text_pair", "other", "--dropout", 0, "--report_to",
          "none", "--global_batch_size", 10, "--per_device_batch_size", 3, "--max_steps", 4, "--eval_every", 2,
          "--checkpoint_every", 2, "--keep_checkpoints", 9, "--learning_rate", "1e-3"]  # fmt: skip
# resumed runs use gradient checkpointing, too
PLAIN, RESUMED, BF16 = "plain", "resumed", "bf16"
TEXTS = ("a fine film", "the story, dull as it is, goes on and on")
Runs = Callable[..., Path]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, reviews: Path) -> Path:
    table = pandas.read_csv(reviews).head(60)
    table["text"] = table["text"].str[:60]
    table["other"] = table["text"].iloc[::-1].tolist()
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    table[["text", "other", "label"]].to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Callable[[str], Path]:
    folder, texts = tmp_path_factory.mktemp("architectures"), list(pandas.read_csv(rows)["text"])
    return functools.cache(lambda name: make_architecture(name, folder / name, texts))


@pytest.fixture(scope="module")
def runs_of(
    tmp_path_factory: pytest.TempPathFactory, model_of: Callable[[str], Path], rows: Path
) -> Runs:
    """`runs_of("ddp x2", names)` -> the folder with NAME/plain for each architecture, NAME/resumed and, where
    all are asked for, NAME/bf16; the processes of a way are started once."""

    @functools.cache
    def run(way: str, names: tuple[str, ...]) -> Path:
        folder, jobs = tmp_path_factory.mktemp(way.replace(" ", "-")), []
        resumed = (
            folder if way == "single" else run(SHARDED[way] if names == EVERY else "single", names)
        )
        kinds = {
            FEW: (PLAIN,) if way == "single" else (PLAIN, RESUMED),
            EVERY: (PLAIN, RESUMED, BF16),
        }[names]
        for name in names:
            settings = ["--model_name_or_path", model_of(name), "--train_file", rows, *COMMON]
            for kind in kinds:
                out = ["--output_dir", folder / name / kind, *ARCHITECTURES[name].settings]
                more = ["--mixed_precision", "bf16" if kind == BF16 else "no"]
                if kind == RESUMED:
                    more += ["--resume", resumed / name / PLAIN / "checkpoints" / "step-00000002"]
                    # which does not support it
                    more += ["--gradient_checkpointing"] if name != "ALBERT" else []
                jobs.append(["recipes.cls", *settings, *out, *more])
        run_jobs(folder, WAYS[way], jobs, seconds=1200)
        return folder

    return run


def assert_same(run: Path, expected: Path, rel: float = 1e-5) -> None:
    steps = [line["step"] for line in lines_of(run / "metrics.jsonl")]
    assert steps == ([3, 4] if run.name == RESUMED else [1, 2, 3, 4])
    assert losses_of(run) == pytest.approx(losses_of(expected)[steps[0] - 1 :], rel=rel)
    if rel > 1e-5:
        return
    mine, theirs = lines_of(run / "predictions.jsonl"), lines_of(expected / "predictions.jsonl")
    for line, other in zip(mine, theirs, strict=True):
        assert line["id"] == other["id"]
        assert line["probabilities"] == pytest.approx(other["probabilities"], abs=1e-4)


def assert_converts(run: Path, out: Path) -> None:
    """The best checkpoint converts to the tensors of model/, which are those that transformers expects."""
    lora = (run / "adapter").exists()
    options = {}
    if lora:
        settings = json.loads((run / "config.json").read_text())["settings"]
        options["base_model"] = Path(settings["model_name_or_path"])
    toolkit.convert(run / "checkpoints" / "best", out, **options)
    expected = load_file(run / "model" / "model.safetensors")
    converted = load_file(out / "model.safetensors")
    assert set(converted) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(converted[name], tensor, rtol=0, atol=1e-6 if lora else 0)
    for folder in (out, run / "model"):
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            folder, output_loading_info=True
        )
        assert not any(loading.values()), loading
        assert (
            all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())
            or lora
        )


def assert_predicts(run: Path, rows: Path, out: Path) -> None:
    words = ["predict", run / "model", rows, "--output", out]
    words += "--overwrite --mixed_precision no".split()
    predict_file(build_parser().parse_args([str(word) for word in words]))
    predicted = pandas.read_json(out, lines=True).filter(like="probability_")
    for line in lines_of(run / "predictions.jsonl"):
        row = predicted.loc[line["id"]].to_list()
        assert row == pytest.approx(line["probabilities"], abs=1e-5)


@pytest.mark.multiprocess
def test_a_few(runs_of: Runs, rows: Path, tmp_path: Path) -> None:
    one, many = runs_of("single", FEW), runs_of("fsdp2 x2", FEW)
    for name in FEW:
        assert_same(many / name / PLAIN, one / name / PLAIN)
        assert_same(many / name / RESUMED, one / name / PLAIN)
        assert_converts(many / name / PLAIN, tmp_path / name)
        assert_predicts(one / name / PLAIN, rows, tmp_path / "rows.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_process(name: str, runs_of: Runs, rows: Path, tmp_path: Path) -> None:
    folder = runs_of("single", EVERY) / name
    losses = losses_of(folder / PLAIN)
    assert max(losses) - min(losses) > 0.001  # constant losses would agree with anything
    assert_converts(folder / PLAIN, tmp_path / "out")
    assert_predicts(folder / PLAIN, rows, tmp_path / "rows.jsonl")
    assert_same(folder / RESUMED, folder / PLAIN)
    assert_same(folder / BF16, folder / PLAIN, rel=0.03)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("way", SHARDED)
def test_ways_agree(way: str, name: str, runs_of: Runs, tmp_path: Path) -> None:
    folder, one = runs_of(way, EVERY) / name, runs_of("single", EVERY) / name / PLAIN
    for kind in (PLAIN, RESUMED):
        assert_same(folder / kind, one)
    assert_same(folder / BF16, one, rel=0.03)
    assert_converts(folder / PLAIN, tmp_path / "out")


def _loaded(folder: Path, **settings: Any) -> tuple[Any, Any]:
    model_settings = ModelSettings(model_name_or_path=str(folder), **settings)
    labels = Labels("single_label_classification", ("neg", "pos"), ("label",))
    return load_classifier(model_settings, labels, seed=1), load_tokenizer(model_settings)


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if "LoRA" not in name])
def test_hidden_states_and_attentions_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    options = ["output_hidden_states", "output_attentions"]
    make_architecture(name, tmp_path, TEXTS * 20)
    attention = None if name == "BigBird" else "eager"  # which computes attention weights
    mine = _loaded(tmp_path, attn_implementation=attention)[0].eval()
    theirs: Any = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, attn_implementation="eager"
    ).eval()
    theirs.config.pad_token_id = mine.config.pad_token_id
    theirs.load_state_dict(mine.state_dict())
    ids = torch.arange(2 * 61).view(2, 61) % 15 + 5
    inputs = {
        "input_ids": ids,
        "attention_mask": (torch.arange(61) < torch.tensor([[61], [40]])).long(),
    }
    if name == "BigBird":
        refusal(mine, **inputs, output_attentions=True, match="computes no attention weights")
        options = ["output_hidden_states"]
    for option in options:
        outputs, expected = (model(**inputs, **{option: True}) for model in (mine, theirs))
        key = option.removeprefix("output_")
        assert len(outputs[key]) == len(expected[key]) > 0
        # their BigBird's are padded to blocks
        values = tuple(each[:, : ids.shape[1]] for each in expected[key])
        torch.testing.assert_close(outputs[key], values, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-4, atol=1e-5)
    # the input of a custom head
    states = [model.base_model(**inputs).last_hidden_state for model in (mine, theirs)]
    assert states[0].shape[:2] == ids.shape
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)


def test_unsupported_models(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not support"):
        _loaded(model_of("ALBERT"), gradient_checkpointing=True)
    folder = shutil.copytree(model_of("GTE"), tmp_path / "new")
    auto_map = {
        "AutoConfig": "configuration.NewConfig",
        "AutoModelForSequenceClassification": "modeling.NewModel",
    }
    edit_json(folder / "config.json", model_type="new", auto_map=auto_map)
    refusal(_loaded, folder, match="needs its own Python code, which is not executed")


def test_a_decoder_pads_with_its_tokenizers_token(
    model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its head reads the last token before padding."""
    model, tokenizer = _loaded(model_of("Qwen3"))
    assert AutoConfig.from_pretrained(model_of("Qwen3")).pad_token_id is None
    assert model.config.pad_token_id == tokenizer.pad_token_id
    both = tokenizer([*TEXTS], return_tensors="pt", padding=True)
    alone = [tokenizer([text], return_tensors="pt") for text in TEXTS]
    with torch.no_grad():
        together = model.eval()(**both).logits
        apart = torch.cat([model(**each).logits for each in alone])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-5)
    # a model saved by another tool may lack it, or name another
    tokenizer.save_pretrained(tmp_path)
    for other in (None, 5):
        model.config.pad_token_id = other
        model.save_pretrained(tmp_path)
        for loaded in (
            load_saved_classifier(ModelSettings(model_name_or_path=str(tmp_path))),
            _loaded(tmp_path)[0],
        ):
            assert loaded.config.pad_token_id == tokenizer.pad_token_id != 5
