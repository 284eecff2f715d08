"""`--teacher`: its outputs are computed once, by all processes together; unsuitable teachers are errors."""

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import inputs
from tests.matrix import TINY, runs
from tests.runs import assert_same_run, edit_json, failed, losses_of
from toolkit.config import TaskSettings, build
from toolkit.data.prepare import prepare_data
from toolkit.data.tokenizer import load_tokenizer
from toolkit.features.distillation.losses import distillation_losses
from toolkit.features.distillation.teacher import add_teacher_logits
from toolkit.pretrained import load_config


@inputs.made_once()
def teacher(folder: Path) -> None:
    """A tiny classifier whose answers depend on the text, with its classes in another order than the data's."""
    torch.manual_seed(5)
    names = {"id2label": {0: "pos", 1: "neg"}, "label2id": {"pos": 0, "neg": 1}}
    kind = {"problem_type": "single_label_classification"}
    classifier = AutoModelForSequenceClassification
    model = classifier.from_pretrained(inputs.sharp_model(), num_labels=2, **names, **kind)
    with torch.no_grad():
        model.classifier.weight *= 100
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(inputs.tiny_model()).save_pretrained(folder)


JOB = [*TINY, "--train_file", inputs.reviews, "--per_device_batch_size", 4, "--global_batch_size", 22, "--max_steps", 8,
       "--eval_every", 4, "--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--num_hidden_layers",
       1]  # fmt: skip


def test_each_row_has_the_teachers_logits_matched_by_class_name(
    accelerator: Any, toolkit_cache: Path, reviews: Path, tiny_model: Path
) -> None:
    names = {"model_name_or_path": tiny_model, "train_file": reviews, "teacher": teacher()}
    settings = build(TaskSettings, {name: str(value) for name, value in names.items()})
    tokenizer = load_tokenizer(settings.model)
    data = prepare_data(settings, tokenizer, load_config(settings.model))
    data = add_teacher_logits(accelerator, settings, str(teacher()), data, tokenizer)
    logits_of_rows, texts = data.train.columns["teacher"], pd.read_csv(reviews)["text"]
    model = AutoModelForSequenceClassification.from_pretrained(teacher()).eval()
    assert data.labels.names == ("neg", "pos")
    assert len(logits_of_rows) == len(data.train)
    for place in (0, 17, len(logits_of_rows) - 1):
        text = texts[int(data.train.rows[place])]
        encoded = tokenizer(text, truncation=True, max_length=131, return_tensors="pt")
        with torch.no_grad():
            pos, neg = model(**encoded).logits[0].tolist()
        assert logits_of_rows[place].tolist() == pytest.approx([neg, pos], rel=1e-4, abs=1e-4)


def distilled(way: str, name: str, *more: Any, teacher: Any = teacher) -> Path:
    return runs(way).run(f"distilled {name}", "recipes.cls", [*JOB, "--teacher", teacher, *more])


def test_the_teacher_is_computed_once_and_a_resumed_run_continues() -> None:
    single = runs("single")
    alone = single.run("undistilled", "recipes.cls", JOB)
    first = distilled("single", "first")
    again = distilled("single", "again", "--distillation_alpha", 1)
    half = distilled("single", "half", "--max_steps", 4, "--checkpoint_every", 4)
    saved = half / "checkpoints" / "step-00000004"
    resumed = distilled("single", "resumed", "--resume", saved)
    other = ("--distillation_alpha", 0.9, "--baselines", "false")
    distilled("single", "changed", "--resume", saved, *other)
    logs = [single.log(f"distilled {name}") for name in ("first", "again", "half", "resumed")]
    assert sum(log.count("training rows, once") for log in logs) == 1
    changed = single.log("distilled changed")
    assert (
        "changed since: max_steps was 4 and is 8; distillation_alpha was 0.5 and is 0.9\n"
        in changed
    )
    assert "changed since: max_steps was 4 and is 8\n" in logs[3]
    for other in (alone, again):
        assert losses_of(first) != pytest.approx(losses_of(other), rel=1e-3)
    assert losses_of(half) == pytest.approx(losses_of(first)[:4], rel=1e-6)
    assert losses_of(resumed) == pytest.approx(losses_of(first)[4:], rel=1e-6)
    saved_model = AutoModelForSequenceClassification.from_pretrained(first / "model")
    assert saved_model.config.num_hidden_layers == len(saved_model.bert.encoder.layer) == 1


@pytest.mark.multiprocess
def test_two_processes_compute_the_teacher_together(tmp_path: Path) -> None:
    """Of a copy, which is not in the cache. Losses under the other strategies: tests/test_sameness.py."""
    copy = shutil.copytree(teacher(), tmp_path / "copy")
    edit_json(copy / "config.json", name_of_the_copy="copy")
    run = distilled("ddp x2", "together", teacher=copy)
    assert "training rows, once" in runs("ddp x2").log("distilled together")
    assert_same_run(run, distilled("single", "first"))


def test_wrong_teachers(tiny_model: Path, tiny_job: Any, tmp_path: Path) -> None:
    data = [*tiny_job, "--max_steps", 1, "--output_dir", tmp_path / "run"]
    names, tokens = (shutil.copytree(teacher(), tmp_path / name) for name in ("names", "tokens"))
    labels = {"id2label": {0: "good", 1: "neg"}, "label2id": {"good": 0, "neg": 1}}
    edit_json(names / "config.json", **labels)
    AutoTokenizer.from_pretrained(teacher(), do_lower_case=False).save_pretrained(tokens)
    for unsuitable, message in (
        (names, "has good, neg (single_label_classification), and the data have neg, pos"),
        (tokens, "tokenizes texts differently (tokens or token types) than the student"),
        (tiny_model, f"--teacher {tiny_model}"),
        (tmp_path / "no", "cannot be loaded"),
    ):
        assert message in failed(*data, "--teacher", unsuitable)


def test_the_loss_is_hintons() -> None:
    torch.manual_seed(0)
    student, distilled = torch.randn(5, 4), torch.randn(5, 4)
    p, q = (distilled / 3).softmax(-1), (student / 3).log_softmax(-1)
    losses = distillation_losses(student, distilled, "single_label_classification", 3.0)
    torch.testing.assert_close(losses, 9 * (p * (p.log() - q)).sum(-1))
    several = distillation_losses(student, distilled, "multi_label_classification", 3.0)
    p = (distilled / 3).sigmoid()
    cross = F.binary_cross_entropy_with_logits(student / 3, p, reduction="none")
    entropy = F.binary_cross_entropy_with_logits(distilled / 3, p, reduction="none")
    torch.testing.assert_close(several, 9 * (cross - entropy).mean(-1))
    assert distillation_losses(student, student, "regression", 2.0).tolist() == [0] * 5
