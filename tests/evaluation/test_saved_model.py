"""toolkit/evaluation/saved_model.py: the tokens that several processes share, the device and the precision."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
from transformers import PretrainedConfig

from tests.evaluation.columns import save_columns
from tests.faults import refusal
from toolkit.config import TaskSettings, build
from toolkit.data.encode import encode_texts
from toolkit.data.table import Table
from toolkit.evaluation.answers import ClassAnswers, labels_of
from toolkit.evaluation.saved_model import (
    SavedModel,
    choose_columns,
    training_columns,
)
from toolkit.pretrained import load_plain_tokenizer
from toolkit.run import Run

TEXTS = ["GOOD film", "the very bad book", "很好 的 书店"]


def test_processes_share_tokens_which_are_then_removed(
    tiny_model: Path, toolkit_cache: Path
) -> None:
    saved: Any = SavedModel(str(tiny_model))
    saved.accelerator = SimpleNamespace(num_processes=2, is_local_main_process=True)
    saved.max_length = 20
    splits = [saved.tokenize([TEXTS], "the file") for _ in range(2)]
    expected = encode_texts(saved.tokenizer, [TEXTS], 20)["input_ids"].tolist()
    for split in splits:
        assert split.folder == splits[0].folder
        assert split.input_ids.tolist() == expected
    saved.remove_tokens("the file")
    saved.remove_tokens("the file")
    assert not list((toolkit_cache / "tokens").glob("*"))


def test_a_model_outside_of_its_run(
    tiny_model: Path, accelerator: Any, toolkit_cache: Path, tmp_path: Path
) -> None:
    """A pair model that was copied, converted or exported still reads pairs, and saves its columns again."""
    rows = "a film,good,pos\na book,bad,neg\n" * 9
    (tmp_path / "pairs.csv").write_text(f"text,more,label\n{rows}")
    once, twice = str(tmp_path / "once"), str(tmp_path / "twice")
    settings = {
        "train_file": str(tmp_path / "pairs.csv"),
        "model_name_or_path": str(tiny_model),
        "text_pair": "more",
        "label_column": "label",
        "quoting": "none",
        "mixed_precision": "no",
    }
    run = Run(build(TaskSettings, settings))
    run.load_data()
    run.tokenizer.save_pretrained(once)
    load_plain_tokenizer(once).save_pretrained(twice)
    names = {"text_column": "text", "text_pair": "more", "label_columns": ["label"]}
    assert training_columns(twice).items() >= names.items()
    assert training_columns(twice)["quoting"] == "none"
    table = Table.of(datasets.Dataset.from_dict({"text": ["a"], "more": ["b"]}), "f.csv", "")
    assert choose_columns(twice, table, None, None) == ["text", "more"]


def test_a_file_with_a_part_of_the_trained_columns(tmp_path: Path) -> None:
    save_columns(tmp_path, text_column="title,content")
    model = str(tmp_path)
    table = Table.of(datasets.Dataset.from_dict({"content": ["a"]}), "f.csv", "")
    refusal(choose_columns, model, table, None, None, says=["no column 'title'", "--text_column"])
    assert choose_columns(model, table, "content", None) == ["content"]


def test_a_model_with_one_output_and_no_type_predicts_a_number() -> None:
    """A reranker of the hub: a softmax of one logit would be 1 for each row. A small number keeps its digits."""
    labels = labels_of(PretrainedConfig(num_labels=1))
    assert labels.problem_type == "regression"
    (answer,) = ClassAnswers(labels).answers(np.array([[3.2123e-5]], np.float32))
    assert answer == {"prediction": 3.2123e-5}
    assert labels_of(PretrainedConfig(num_labels=2)).problem_type == "single_label_classification"
