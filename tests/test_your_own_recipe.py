"""docs/your-own-recipe.md: each edit of recipes/cls.py runs, with equal losses under every launch, and resumes."""

import json
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file
from sklearn.metrics import f1_score
from transformers import AutoModelForSequenceClassification as Classifier

import toolkit
from tests import inputs
from tests.faults import refusal
from tests.matrix import TINY, runs
from tests.runs import ROOT, assert_same_run, lines_of, losses_of, recipe, slow_but, start

PAGES = [ROOT / "docs" / "your-own-recipe.md", ROOT / "docs" / "your-own-recipe.zh.md"]
TOPICS = ["--train_file", inputs.uneven_reviews, "--text_column", "text", "--label_column", "label"]
# run -> (edit, its settings)
JOBS: dict[str, tuple[str, list[Any]]] = {
    "focal": ("focal", ["--gamma", 1.5, "--rare_weight", 2]),
    "learned with LoRA": ("learned", ["--lora_r", 4, "--ema_decay", 0.5]),
    "contrastive in fewer": ("contrastive", ["--per_device_batch_size", 22]),
    "metric": ("metric", ["--metric_for_best_model", "mcc"]),
    "second with LoRA": ("second", ["--lora_r", 4, *TOPICS]),
}
RESUMED = ("learned", "sgd", "schedule", "own_model", "noise", "second")
JOBS |= {edit: (edit, []) for edit in ("entropy", "contrastive", "frozen", "logged", *RESUMED)}
JOBS |= {"second": ("second", TOPICS), "sgd": ("sgd", ["--data_seed", 1])}  # gradients cancel by 42
STEPS, HALF = 6, 3
WORDS = [*TINY, "--train_file", inputs.reviews, "--eval_every", 3, "--checkpoint_every", HALF, "--learning_rate",
         "5e-3", "--lr_scheduler_type", "constant", "--global_batch_size", 22, "--per_device_batch_size", 6,
         "--max_eval_samples", 21, "--max_steps", STEPS]  # fmt: skip
WAYS = ("ddp x2", "zero3 x2", "zero2 x2", "fsdp2 x2")


def edits_of(page: Path) -> dict[str, list[str]]:
    """Name -> its diffs."""
    _, *parts = re.split(r"<!-- edit: (\w+) -->", page.read_text(encoding="utf-8"))
    edits = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        edits[name] = re.findall(r"```diff\n(.*?)```", text.split("\n## ")[0], re.DOTALL)
    return edits


def edited(diffs: Sequence[str]) -> str:
    """recipes/cls.py with these diffs applied; the lines they remove must occur once."""
    text = (ROOT / "recipes" / "cls.py").read_text(encoding="utf-8")
    for diff in diffs:
        lines = diff.splitlines()
        before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
        after = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def script(name: str, text: str) -> Path:
    """A recipe with this text."""

    def write(folder: Path) -> None:
        (folder / "recipe.py").write_text(text, encoding="utf-8")

    return inputs.shared(f"recipe {name}", write) / "recipe.py"


def recipe_and_words(name: str) -> tuple[Path, list[Any]]:
    edit, settings = JOBS[name]
    return script(edit, edited(edits_of(PAGES[0])[edit])), [*WORDS, *settings]


def run_of(way: str, name: str) -> Path:
    return runs(way).run(f"own {name}", *recipe_and_words(name))


single = partial(run_of, "single")


def weights_of(run: Path) -> Any:
    return load_file(run / "model" / "model.safetensors")


def test_each_edit_is_run() -> None:
    """In Chinese they are the same: tests/test_docs.py."""
    assert {edit for edit, _ in JOBS.values()} == set(edits_of(PAGES[0]))


def test_a_custom_metric_chooses_the_best_model(tmp_path: Path) -> None:
    path, words = recipe_and_words("metric")
    recipe(*words, "--output_dir", tmp_path / "run", script=path, pages=True).succeeded()
    best = max(lines_of(tmp_path / "run" / "eval.jsonl"), key=lambda line: line["mcc"])
    state = json.loads((tmp_path / "run" / "model" / "trainer_state.json").read_text())
    assert state["global_step"] == best["step"]
    for page in ("report.html", "model/README.md"):
        assert "mcc" in (tmp_path / "run" / page).read_text(encoding="utf-8")


def test_a_custom_model_is_loaded_as_the_page_says() -> None:
    folder = single("own_model") / "model"
    *_, program = re.findall(
        r"```python\n(.*?)```", PAGES[0].read_text(encoding="utf-8"), re.DOTALL
    )
    program = program.replace("from my_recipe", "from recipe")
    program = program.replace("runs/mine/model", str(folder))
    program = program.replace("bert-base-chinese", str(inputs.tiny_model()))
    path = recipe_and_words("own_model")[0].parent
    done = start([sys.executable, "-c", program], env={"PYTHONPATH": f"{path}:{ROOT}"})
    assert done.code == 0, done.err
    assert re.fullmatch(r"tensor\(\[\[0\.\d+, 0\.\d+\]\]\)", done.out.strip())
    assert (folder / "encoder" / "config.json").is_file()
    refusal(toolkit.predict, folder, ["a"], says=["load_state_dict"])


@pytest.mark.parametrize("name", ["second", "second with LoRA"])
def test_a_second_head_is_loaded_as_the_page_says(name: str) -> None:
    """The probabilities of both are those of the evaluation, whose topics belong to the rows."""
    run = single(name)
    lines = lines_of(run / "predictions.jsonl")
    rows = pd.read_csv(inputs.uneven_reviews()).iloc[[line["id"] for line in lines]]
    texts = rows["text"].tolist()
    programs = re.findall(r"```python\n(.*?)```", PAGES[0].read_text("utf-8"), re.DOTALL)
    (program,) = [text for text in programs if "model.topic" in text]
    program = program.replace("runs/mine", str(run)).replace('["a fine film"]', repr(texts))
    values: dict[str, Any] = {}
    exec(program.replace("truncation", "padding=True, truncation"), values)
    probabilities = values["output"].logits.softmax(-1).flatten().tolist()
    expected = [number for line in lines for number in line["probabilities"]]
    assert probabilities == pytest.approx(expected, abs=1e-5)
    assert toolkit.predict(run / "model", texts)[0]["prediction"] == lines[0]["prediction"]
    names = values["model"].config.topics
    assert names == ["long", "short"]
    topics = [names[place] for place in values["topics"].argmax(-1).tolist()]
    score = f1_score(rows["topic"], topics, labels=names, average="macro", zero_division=0)
    assert lines_of(run / "eval.jsonl")[-1]["topic_f1_macro"] == pytest.approx(score)


def test_a_parameter_of_the_loss_is_trained_and_saved() -> None:
    run = single("learned")
    weights = weights_of(run)
    assert weights["loss.log_scale"].shape == (1,)
    assert (weights["loss.bias"] != 0).all()
    model, loading = Classifier.from_pretrained(run / "model", output_loading_info=True)
    assert {*loading["unexpected_keys"]} == {"loss.log_scale", "loss.bias"}
    assert not loading["missing_keys"]
    assert (model.state_dict()["classifier.weight"].numpy() == weights["classifier.weight"]).all()


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("way", ["single", *slow_but(WAYS, *WAYS[:2])])
def test_a_resumed_run_continues_the_uninterrupted_one(way: str, name: str) -> None:
    whole = run_of(way, name)
    path, words = recipe_and_words(name)
    words += ["--resume", whole / "checkpoints" / f"step-{HALF:08d}"]
    resumed = runs(way).run(f"own {name} resumed", path, words)
    assert losses_of(resumed) == pytest.approx(losses_of(whole)[HALF:], rel=1e-6)


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("way", slow_but(WAYS, *WAYS[:2]))
def test_equal_losses_under_every_launch(way: str, name: str) -> None:
    run, expected = run_of(way, name), single(name)
    assert len(losses_of(run)) == len(set(losses_of(run))) == STEPS
    # micro-batches differ, and with them the loss, as documented
    if name == "contrastive in fewer":
        assert np.isfinite(losses_of(run)).all()
        assert losses_of(run) != pytest.approx(losses_of(expected), rel=1e-5)
        return
    assert_same_run(run, expected)
    mine, theirs = weights_of(run), weights_of(expected)
    assert {key: mine[key].shape for key in mine} == {key: theirs[key].shape for key in theirs}


@pytest.mark.parametrize(("every", "evaluations"), [(9, {4}), (3, {3, 4})])
def test_a_loop_that_ends_early_is_complete(every: int, evaluations: set[int]) -> None:
    leave = "         optimizer.zero_grad()\n+        if step.number == 4:\n+            break\n"
    path = script("left early", edited([leave]))
    words = [*WORDS, "--eval_every", every, "--checkpoint_every", every, "--logging_steps", every]
    run = runs("single").run(f"left early {every}", path, words)
    assert [line["step"] for line in lines_of(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert {line["step"] for line in lines_of(run / "eval.jsonl")} == evaluations
    assert (run / "checkpoints" / "last").resolve().name == "step-00000004"
    assert (run / "model" / "model.safetensors").is_file()


MEANS = (
    " import toolkit\n+import torch\n",
    """+    layer = torch.nn.BatchNorm1d(2)
+    model.classifier = torch.nn.Sequential(model.classifier, layer)
     optimizer = toolkit.make_optimizer(model, training)
""",
    """+        if step.number > 1:
+            means = accelerator.gather(toolkit.unwrapped(model).classifier[1].running_mean[None])
+            assert means.any() and not means.diff(dim=0).any()
         for batch in step.micro_batches(model):  # this process's part of the global batch
""",
)


@pytest.mark.parametrize("way", ["zero2 x2", "fsdp2 x2"])
def test_running_means_are_equal_in_all_processes(way: str) -> None:
    runs(way).run("means", script("means", edited(MEANS)), WORDS)
