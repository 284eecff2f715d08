"""model/self_test.json: what a model folder makes of fixed texts, compared wherever it is loaded.

Written from the folder itself, by transformers alone, in float32 on the CPU, text by text; compared
in one padded batch, which shows a wrong mask, too. The texts are ours: no text of a user is
published with a model.

    versions, weights      of the libraries; a digest of the files of weights
    max_length             tokens that are read of a text
    classes, problem_type  names of a classifier's outputs, and what they mean
    tokenizer_json         whether that file makes the same tokens: servers read it
    tolerance              see `TOLERANCE`
    cases                  text or pair (the first repeated `times` times), input_ids, and outputs:
                           at most 500 of the model's numbers, evenly spaced; none of no token, of
                           the last text, and where a BigBird's depend on the batch
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers.utils import cached_file

from toolkit.checkpoint.model_folder import LENGTH_FILE
from toolkit.config import ModelSettings
from toolkit.data.tokenizer import choose_max_length, has_token_types, load_tokenizer
from toolkit.data.tokenizer_check import (
    LONG,
    TIMES,
    checked_texts,
    first_difference,
    ids_of_file,
    token_ids,
)
from toolkit.data.tokens import LengthBuckets
from toolkit.demo import model_path
from toolkit.errors import UserError, first_line, listing
from toolkit.models.classifier import from_pretrained
from toolkit.pretrained import load_config, quiet_transformers, refuse_random
from toolkit.utils.cache import digest_of_files
from toolkit.utils.features import features
from toolkit.utils.files import read_json_object, replace_file
from toolkit.utils.log import log_on_rank_0
from toolkit.utils.versions import versions

FILE = "self_test.json"
TOLERANCE = {"no": 1e-3, "fp16": 3e-2, "bf16": 1e-1}
"""By precision: how far outputs may differ, relative to how far those of different texts do."""
_ROUNDED = {"torch.float16": TOLERANCE["fp16"], "torch.bfloat16": TOLERANCE["bf16"]}
"""The same for weights that were cast since, by their dtype in config.json."""
_MOST_OUTPUTS = 500
_PACKAGES = ("torch", "transformers", "tokenizers")
_WEIGHTS = ("*.safetensors", "*.bin", "*.onnx", "openvino_model.*")


class Loaded(NamedTuple):
    """What was loaded from a model folder."""

    folder: Path
    tokenizer: Any
    config: Any
    model: Any


def load_plainly(folder: Path) -> Loaded:
    """As transformers loads it, in float32 on the CPU; an exported model by its runtime. Raises
    UserError for one that cannot be loaded."""
    settings = ModelSettings(model_name_or_path=str(folder))
    config = load_config(settings)
    tokenizer = load_tokenizer(settings)
    for feature in features():
        model = feature.load_model(str(folder), config)
        if model is not None:
            return Loaded(folder, tokenizer, config, model)
    model_class = getattr(transformers, config.architectures[0])
    model, loading = from_pretrained(model_class, str(folder), config)
    missing = loading["missing_keys"]
    refuse_random(str(folder), (key for key in missing if "pooler" not in key))
    return Loaded(folder, tokenizer, config, model)


def check_folder(name: str, mode: str = "error") -> bool:
    """`check_self_test` of a folder's or a hub name's model, which is loaded for it."""
    folder = folder_of(name)
    if mode == "off" or not (folder / FILE).is_file():
        return False
    return check_self_test(load_plainly(folder), mode)


def folder_of(name: str) -> Path:
    """The folder of a model: of a hub name that of its files in the cache, this one among them."""
    with contextlib.suppress(OSError, ValueError):
        return Path(str(cached_file(model_path(name), FILE))).parent
    return Path(name)


def write_self_test(folder: Path, tolerance: float = TOLERANCE["no"]) -> None:
    """Writes the file into the folder of a model of transformers. `tolerance`: more for weights in
    8 bits, whose products differ between processors. Raises UserError for a model that cannot be
    loaded, and OSError."""
    loaded = load_plainly(folder)
    tokenizer, config = loaded.tokenizer, loaded.config
    columns = tokenizer.init_kwargs.get("training_columns", {})
    texts = checked_texts(pairs=bool(columns.get("text_pair")))
    length = choose_max_length(None, tokenizer, config)
    ids = token_ids(tokenizer, texts, length)
    buckets = LengthBuckets.of_model(config)
    longest = buckets.full if buckets else length
    cases = []
    for text, tokens in zip(texts[:-1], ids, strict=False):
        case = {"text": text, "times": 1, "input_ids": tokens, "outputs": []}
        if 0 < len(tokens) <= longest:
            [row] = _outputs(loaded, [text], length)
            case["outputs"] = [float(f"{number:.7g}") for number in row]
        cases.append(case)
    long = [LONG, *texts[-1][1:]]
    cases.append({"text": long, "times": TIMES, "input_ids": ids[-1], "outputs": []})
    content = {
        "versions": versions(_PACKAGES),
        "weights": _digest_of_weights(folder),
        "max_length": length,
        "classes": _classes(config),
        "problem_type": config.problem_type,
        "tokenizer_json": ids_of_file(folder, tokenizer, texts, length) == ids,
        "tolerance": tolerance,
        "cases": cases,
    }
    with replace_file(folder / FILE) as draft:
        draft.write_text(json.dumps(content, ensure_ascii=False) + "\n", "utf-8")


def try_self_test(folder: Path) -> None:
    """Writes the file. A model that cannot be tested is a line: neither the results of hours nor a
    converted checkpoint depend on it."""
    try:
        write_self_test(folder)
    except Exception as error:
        log_on_rank_0(f"{folder} has no {FILE}: {first_line(error)}")


def check_self_test(loaded: Loaded, mode: str = "error", precision: str = "no") -> bool:
    """Compares a model that computes in `precision` with its folder's file; False if there is none,
    or `mode` is `off`. Raises UserError if the model answers otherwise than when it was saved; in
    the mode `warn` that is a line in the log."""
    file = loaded.folder / FILE
    if mode == "off" or not file.is_file():
        return False
    try:
        test = read_json_object(file)
        fault = _tokenizer_fault(loaded, test) or _output_fault(loaded, test, precision)
        since = _since(test["versions"])
    except Exception as error:
        fault, since = f"{FILE} cannot be compared", f" [{first_line(error)}]"
    if fault:
        line = f"{loaded.folder} does not answer as when it was saved: {fault}{since}"
        if mode == "error":
            raise UserError(
                f"{line}. Copy it again, or convert the run's checkpoint; if you know why it differs, "
                "load it with --self_test warn"
            )
        log_on_rank_0(line, logging.WARNING)
    return True


def _since(saved: dict[str, Any]) -> str:
    now = versions(_PACKAGES)
    others = [f"{name} {saved[name]}" for name in saved if saved[name] != now.get(name)]
    return f" [saved with {listing(others)}]" if others else ""


def _tokenizer_fault(loaded: Loaded, test: dict[str, Any]) -> str | None:
    folder, tokenizer, config, _ = loaded
    classes, length = _classes(config), choose_max_length(None, tokenizer, config)
    if classes != test["classes"]:
        return f"its classes are {listing(classes)} instead of {listing(test['classes'])}"
    if config.problem_type != test["problem_type"]:
        return f"problem_type is {config.problem_type} instead of {test['problem_type']}"
    served = folder / LENGTH_FILE
    if (
        served.is_file()
        and read_json_object(served)["max_seq_length"] != test["max_length"]
    ):
        return f"{LENGTH_FILE}, which servers read, has another length"
    if length != test["max_length"]:
        return f"it reads {length} tokens of a text instead of {test['max_length']}"
    texts = [_text_of(case) for case in test["cases"]]
    expected = [case["input_ids"] for case in test["cases"]]
    fault = first_difference(tokenizer, token_ids(tokenizer, texts, length), expected)
    if fault:
        return f"its tokenizer makes other tokens: {fault}"
    of_file = ids_of_file(folder, tokenizer, texts, length)
    if test["tokenizer_json"] and of_file:
        fault = first_difference(tokenizer, of_file, expected)
    if fault:
        return f"tokenizer.json, which servers read, makes other tokens: {fault}"
    return None


def _output_fault(loaded: Loaded, test: dict[str, Any], precision: str) -> str | None:
    cases = [case for case in test["cases"] if case["outputs"]]
    texts = [_text_of(case) for case in cases]
    found = _outputs(loaded, texts, test["max_length"])
    expected = [np.array(case["outputs"]) for case in cases]
    if [len(row) for row in found] != [len(row) for row in expected]:
        return "it has another number of outputs"
    worst = np.array([np.abs(a - b).max() for a, b in zip(found, expected, strict=True)])
    common = min(map(len, expected))
    spread = np.ptp([row[:common] for row in expected], axis=0).max()
    # a model may hardly distinguish texts: rounding is relative to the size of its outputs
    spread = max(spread, 0.25 * np.abs(np.concatenate(expected)).max())
    tolerance = max(test["tolerance"], TOLERANCE[precision])
    weights = "the same weights"
    if _digest_of_weights(loaded.folder) != test["weights"]:
        weights = "other weights"
        tolerance = max(tolerance, _ROUNDED.get(str(loaded.config.dtype), 0.0))
    if worst.max() <= tolerance * spread:
        return None
    return (
        f"with {weights}, its outputs for {texts[int(worst.argmax())][0][:20]!r} differ by "
        f"{worst.max():.2g}, where those of different texts differ by {spread:.2g}"
    )


@torch.no_grad()
def _outputs(loaded: Loaded, texts: Sequence[Any], max_length: int) -> list[np.ndarray]:
    """The `outputs` of cases, from one padded batch."""
    _, tokenizer, config, model = loaded
    options = {"truncation": "longest_first", "max_length": max_length}
    encodings = [dict(tokenizer(*text, **options)) for text in texts]
    batch = dict(tokenizer.pad(encodings, return_tensors="pt"))
    accepted = inspect.signature(model.forward).parameters
    if "token_type_ids" not in accepted or not has_token_types(config):
        batch.pop("token_type_ids", None)
    if config.is_encoder_decoder and not _classes(config):
        start = config.decoder_start_token_id
        batch["decoder_input_ids"] = torch.full((len(texts), 1), start)
    device = next(model.parameters(), torch.zeros(0)).device
    inputs = {name: tensor.to(device) for name, tensor in batch.items()}
    with quiet_transformers():
        output = model.eval()(**inputs)
    numbers = getattr(output, "logits", None)
    if numbers is None:  # an encoder without a head
        numbers = output[0]
    rows = list(numbers.float().cpu().numpy())
    is_text = batch["attention_mask"].bool().numpy()
    if rows[0].ndim == 2 and len(rows[0]) == is_text.shape[1]:
        # an output for each token: of padding none
        rows = [row[real] for row, real in zip(rows, is_text, strict=True)]
    flat = [row.reshape(-1) for row in rows]
    return [row[:: -(-len(row) // _MOST_OUTPUTS)] for row in flat]


def _text_of(case: dict[str, Any]) -> tuple[str, ...]:
    return (case["text"][0] * case["times"], *case["text"][1:])


def _classes(config: Any) -> list[Any]:
    """Of a classifier of texts or tokens."""
    if "Classification" not in str(config.architectures):
        return []
    return [config.id2label[index] for index in range(config.num_labels)]


def _digest_of_weights(folder: Path) -> str:
    files = [file for pattern in _WEIGHTS for file in folder.glob(pattern)]
    return digest_of_files(folder, files)
