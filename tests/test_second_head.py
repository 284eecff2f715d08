"""docs/your-own-recipe.md, A second head: both heads are trained, saved, and loaded as the page says.

Its losses under every launch, with LoRA and resumed: tests/test_your_own_recipe.py.
"""

import re

import pandas as pd
import pytest
from safetensors.numpy import load_file
from sklearn.metrics import f1_score

import toolkit
from tests import inputs
from tests.runs import lines_of
from tests.test_your_own_recipe import PAGES, run_of

TOPICS = ["long", "short"]


@pytest.mark.parametrize("name", ["second", "second with LoRA"])
def test_both_heads_are_loaded_as_the_page_says(name: str) -> None:
    """Their probabilities are those of the evaluation, whose topics belong to the rows of the file."""
    run = run_of("single", name)
    lines = lines_of(run / "predictions.jsonl")
    rows = pd.read_csv(inputs.uneven_reviews()).iloc[[line["id"] for line in lines]]
    program = next(
        text
        for text in re.findall(r"```python\n(.*?)```", PAGES[0].read_text("utf-8"), re.DOTALL)
        if "model.topic" in text
    )
    program = program.replace("runs/mine", str(run)).replace(
        "truncation", "padding=True, truncation"
    )
    values = {}
    exec(program.replace('["a fine film"]', repr(rows["text"].tolist())), values)
    probabilities = values["output"].logits.softmax(-1).flatten().tolist()
    expected = [number for line in lines for number in line["probabilities"]]
    assert probabilities == pytest.approx(expected, abs=1e-5)
    assert (
        toolkit.predict(run / "model", rows["text"].tolist())[0]["prediction"]
        == lines[0]["prediction"]
    )

    topics = [TOPICS[place] for place in values["topics"].argmax(-1).tolist()]
    assert values["model"].config.topics == TOPICS
    last = lines_of(run / "eval.jsonl")[-1]
    score = f1_score(rows["topic"], topics, labels=TOPICS, average="macro", zero_division=0)
    assert last["topic_f1_macro"] == pytest.approx(score)


def test_the_second_head_is_trained_and_in_each_checkpoint() -> None:
    checkpoints = run_of("single", "second") / "checkpoints"
    third, last = (
        load_file(checkpoints / f"step-0000000{step}" / "weights.safetensors") for step in (3, 6)
    )
    assert (third["topic.weight"] != last["topic.weight"]).all()
