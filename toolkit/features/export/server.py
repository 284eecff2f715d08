"""`toolkit export MODEL OUT --to server`: temperature and thresholds become weights of the last
layer, for servers that do not read decisions.json."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.checkpoint.model_folder import write_length
from toolkit.data.labels import MULTI
from toolkit.data.tokenizer import head_tokens_of
from toolkit.data.tokenizer_check import checked_texts, ids_of_file, token_ids
from toolkit.errors import UserError
from toolkit.evaluation.answers import DECISIONS, ClassAnswers
from toolkit.evaluation.saved_model import SavedModel
from toolkit.evaluation.self_test import FILE, check_folder, write_self_test
from toolkit.pretrained import quiet_transformers
from toolkit.utils.files import explain_write_errors, replace_folder

# the last layer of transformers' classifiers, where nothing comes after it
_LAST_LAYERS = ("classifier", "classifier.out_proj", "score")
# what belongs to the unchanged weights; hidden files, `out`'s draft among them if it lies there
_OWN = shutil.ignore_patterns(".*", "*.safetensors*", "*.bin*", DECISIONS, FILE)


def export_for_servers(
    saved: SavedModel, answers: ClassAnswers, out: Path, self_test: str
) -> None:
    """Writes the folder `out` atomically. `self_test`: the mode of `check_folder`. Raises UserError
    for a model that a server would answer wrongly with, or that needs no change."""
    folder = Path(str(saved.settings.model_name_or_path))
    check_folder(str(folder), self_test)
    length = saved.choose_max_length(None)
    _check_tokens(folder, saved.tokenizer, length)
    temperature, offsets = answers.temperature_and_offsets()
    if temperature == 1 and not offsets.any():
        why = f"there is no temperature and no threshold in its {DECISIONS}"
        raise UserError(f"{folder}: {why}: a server takes the folder as it is")
    # transformers' default without an entry in config.json
    dtype = saved.config.dtype or torch.float32
    model = answers.load(saved.settings)
    layer = _last_layer(folder, model)
    _change(layer, temperature, offsets, folder)
    # a threshold rounded to 16 bits would be another one: this layer stays in float32
    model.to(dtype)
    layer.float()
    notes = _notes(answers)
    with explain_write_errors(out), replace_folder(out) as draft, quiet_transformers():
        shutil.copytree(folder, draft, ignore=_OWN, dirs_exist_ok=True)
        model.save_pretrained(draft)
        write_length(length, draft)
        write_self_test(draft)
        with (draft / "README.md").open("a", encoding="utf-8") as card:
            card.write("\n## Exported for servers\n\n" + "\n".join(notes) + "\n")
    print("\n".join([*notes, f"wrote {out}: toolkit predict {out} FILE"]))


def _check_tokens(folder: Path, tokenizer: Any, length: int) -> None:
    """Raises UserError if a server reads other tokens than in training."""
    texts = checked_texts()
    ids = ids_of_file(folder, tokenizer, texts, length)
    if ids != token_ids(tokenizer, texts, length) or head_tokens_of(tokenizer):
        why = "tokenizer.json, which servers read, does not make the tokens of training"
        kinds = "it knows neither jieba nor head_tokens"
        raise UserError(f"{folder}: {why} ({kinds}): use toolkit predict")


def _last_layer(folder: Path, model: Any) -> torch.nn.Linear:
    """Raises UserError for a model whose last layer is not known."""
    modules = dict(model.named_modules())
    for path in _LAST_LAYERS:
        layer = modules.get(path)
        if type(layer) is torch.nn.Linear and layer.out_features == model.config.num_labels:
            return layer
    why = f"the last layer of {type(model).__name__} is not known to be linear"
    raise UserError(f"{folder}: {why}: apply {DECISIONS} to the server's scores yourself")


def _change(
    layer: torch.nn.Linear, temperature: float, offsets: np.ndarray, folder: Path
) -> None:
    """W h + b becomes (W h + b) / temperature - offsets (C,). Raises UserError for thresholds of a
    layer without a bias."""
    with torch.no_grad():
        layer.weight.div_(temperature)
        if layer.bias is not None:
            layer.bias.div_(temperature).sub_(torch.from_numpy(offsets))
        elif offsets.any():
            why = "its last layer has no bias, which a threshold would change"
            raise UserError(f"{folder}: {why}: compare the server's probabilities with it")


def _notes(answers: ClassAnswers) -> list[str]:
    """What the folder's scores mean."""
    temperature, offsets = answers.temperature_and_offsets()
    notes = [f"Temperature ({temperature:.4g}) and thresholds are in the last layer."]
    if offsets.any():
        notes.append(
            "The score of a label with the threshold t and the probability p is "
            "p (1 - t) / (p (1 - t) + (1 - p) t): above 0.5 where p is above t."
        )
    if answers.labels.problem_type == MULTI:
        notes.append("The answer is each label with a score above 0.5, a logit above 0.")
    if answers.abstains(0.0):
        notes.append("Weights cannot abstain: a server answers every text (abstain_below).")
    return notes
