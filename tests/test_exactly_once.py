"""Promise 2, for every size of the data up to two global batches plus 1: the ids of an evaluation, of lengths even and
uneven, in batches counted in samples and in tokens. Epochs of training: tests/data/test_batches.py.

Predictions are in the order of the file, for every kind of label; so are those of `toolkit predict`.

It is a job of tests/matrix.py, too: `main`.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import inputs
from tests.matrix import runs
from tests.runs import lines_of, slow_but, start
from toolkit import launch
from toolkit.config import TrainingSettings
from toolkit.data.tokens import Split
from toolkit.evaluation import Outputs
from toolkit.evaluation.outputs import BatchSizes
from toolkit.training.prepare import prepare_for_strategy

PER_DEVICE = {"single": 4, "ddp x2": 3, "ddp x3": 2, "zero3 x2": 2, "zero3 x3": 2}


@pytest.mark.parametrize("way", slow_but(PER_DEVICE, *list(PER_DEVICE)[:-1]))
def test_every_size(way: str) -> None:
    words = [inputs.tiny_model, PER_DEVICE[way]]
    runs(way).run("every size", "tests.test_exactly_once", words)
    assert "every sample exactly once" in runs(way).log("every size")


def main() -> None:
    model_path, per_device = sys.argv[1], int(sys.argv[2])
    accelerator = launch.make_accelerator("no")
    world = accelerator.num_processes
    largest = 2 * per_device * world + 1
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=2)
    optimizer = torch.optim.AdamW(model.parameters())
    settings = TrainingSettings(global_batch_size=world, per_device_batch_size=1)
    model, _ = prepare_for_strategy(accelerator, settings, 1, model, optimizer)
    for size in range(1, largest + 1):
        # 24 tokens: batches of one, two or more samples, as their lengths allow
        for even, most in ((True, None), (False, None), (False, 24)):
            split = split_of(size, even)
            outputs = Outputs(accelerator, split, tokenizer, BatchSizes(per_device, most))
            for batch in outputs.batches(model):
                logits = model(**batch.inputs).logits
                assert not logits.requires_grad
                outputs.add(accelerator.gather_for_metrics((batch.ids, logits, batch.ids)))
            if in_order := outputs.in_order():
                rows, ids = in_order
                assert ids.tolist() == split.rows.tolist(), (size, even, most, ids)
                assert len(rows) == size
                assert size < 3 or len(np.unique(rows, axis=0)) > 1  # outputs belong to samples
    if accelerator.is_main_process:
        print(f"sizes 1 to {largest}: every sample exactly once", flush=True)


def split_of(size: int, even: bool) -> Split:
    """Random tokens; rows that are not 0..n-1, as after cleaning."""
    generator = np.random.default_rng(size)
    lengths = np.full(size, 6) if even else generator.integers(2, 17, size)
    flat = generator.integers(5, 40, lengths.sum()).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    labels, rows = generator.integers(0, 2, size), np.arange(size) * 3 + 1
    return Split("test", Path(), flat, offsets, labels, rows)


F1 = {"accuracy", "f1_macro", "f1_weighted", "per_class"}
EXPECTED = {
    "six classes": {*F1, "confusion_matrix"},
    "multi-label": {*F1, "f1_micro"},
    "regression": {"mse", "mae", "pearson"},
    "several numbers": {"mse", "mae", "pearson", "per_output"},
}
FILES = ("config.json", "metrics.jsonl", "report.html", "model/config.json", "model/README.md")


@pytest.mark.parametrize("kind", EXPECTED)
def test_every_kind_of_label(kind: str) -> None:
    run = runs("ddp x2")[kind]
    last = lines_of(run / "eval.jsonl")[-1]
    assert set(last) == {"step", "split", "num_samples", "loss"} | EXPECTED[kind]
    assert (last["split"], last["num_samples"]) == ("test", 23)
    lines = lines_of(run / "predictions.jsonl")
    assert [line["id"] for line in lines] == list(range(23))
    rows = lines_of(inputs.labelled(kind, "test"))
    truth = [row.get("label", [row.get("length"), row.get("good")]) for row in rows]
    expected = truth if kind in ("six classes", "multi-label") else pytest.approx(np.array(truth))
    assert [line["label"] for line in lines] == expected
    labels = json.loads((run / "config.json").read_text())["data"]["labels"]
    if kind == "six classes":
        assert labels == [f"class {number}" for number in (0, 2, 4, 6, 8, 10)]
    if kind == "several numbers":
        assert labels == list(last["per_output"]) == ["length", "good"]
        answers = np.array([line["prediction"] for line in lines])
        errors = ((answers - np.array(truth)) ** 2).mean(axis=0)
        each_mse = [each["mse"] for each in last["per_output"].values()]
        assert each_mse == pytest.approx(errors, rel=1e-4)
        assert [last["loss"], last["mse"]] == pytest.approx([errors.mean()] * 2, rel=1e-4)
    for name in FILES:
        assert (run / name).stat().st_size > 0


def test_predict_answers_for_texts_as_for_lines_of_a_file(tmp_path: Path) -> None:
    model, texts = runs("ddp x2")["six classes"] / "model", ["good film", "", "very dull room"]
    file = tmp_path / "new.txt"
    file.write_text("\n".join(texts) + "\n")
    start(["toolkit", "predict", model, file]).succeeded()
    table = pd.read_csv(tmp_path / "new.predictions.csv", keep_default_na=False)
    typed = [word for text in texts for word in ("--text", text)]
    finished = start(["toolkit", "predict", model, *typed]).succeeded()
    answers = [json.loads(line) for line in finished.out.splitlines()]
    for key in ("text", "prediction"):
        assert [answer[key] for answer in answers] == table[key].to_list()
    assert table["text"].to_list() == texts
    chances = [answer["probabilities"] for answer in answers]
    assert np.array(chances) == pytest.approx(table.filter(like="probability_"), abs=2e-6)
