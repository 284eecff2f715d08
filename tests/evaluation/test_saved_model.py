"""toolkit/evaluation/saved_model.py: the columns it was trained on, and what it predicts."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PretrainedConfig

from tests.faults import refusal
from tests.report.made import save_columns
from toolkit.config import TaskSettings, build
from toolkit.data.table import Table
from toolkit.evaluation import saved_model
from toolkit.evaluation.answers import ClassAnswers, labels_of
from toolkit.evaluation.saved_model import choose_columns
from toolkit.pretrained import load_plain_tokenizer
from toolkit.run import Run


def test_a_model_outside_of_its_run(
    tiny_model: Path, accelerator: Any, toolkit_cache: Path, tmp_path: Path
) -> None:
    """A pair model that was copied, converted or exported still reads pairs, and saves its columns again."""
    rows = "a film,good,pos\na book,bad,neg\n" * 9
    (tmp_path / "pairs.csv").write_text(f"text,more,label\n{rows}")
    once, twice = str(tmp_path / "once"), str(tmp_path / "twice")
    settings = {"train_file": str(tmp_path / "pairs.csv"), "model_name_or_path": str(tiny_model),
                "text_pair": "more", "label_column": "label", "quoting": "none"}  # fmt: skip
    run = Run(build(TaskSettings, {**settings, "mixed_precision": "no"}))
    run.load_data()
    run.tokenizer.save_pretrained(once)
    load_plain_tokenizer(once).save_pretrained(twice)
    names = {"text_column": "text", "text_pair": "more", "label_columns": ["label"]}
    assert saved_model.training_columns(twice).items() >= names.items()
    assert saved_model.training_columns(twice)["quoting"] == "none"
    table = Table.of(datasets.Dataset.from_dict({"text": ["a"], "more": ["b"]}), "f.csv", "")
    assert choose_columns(twice, table, None, None) == ["text", "more"]
    save_columns(Path(once), text_column="title,more")
    says = ["no column 'title'", "--text_column"]
    refusal(choose_columns, once, table, None, None, says=says)
    assert choose_columns(once, table, "more", None) == ["more"]


def test_a_model_with_one_output_and_no_type_predicts_a_number() -> None:
    """A reranker of the hub: a softmax of one logit would be 1 for each row. A small number keeps its digits."""
    labels = labels_of(PretrainedConfig(num_labels=1))
    assert labels.problem_type == "regression"
    (answer,) = ClassAnswers(labels).answers(np.array([[3.2123e-5]], np.float32))
    assert answer == {"prediction": 3.2123e-5}
    assert labels_of(PretrainedConfig(num_labels=2)).problem_type == "single_label_classification"
