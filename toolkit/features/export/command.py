"""`toolkit export MODEL OUT --to openvino|onnx`: a classifier for a runtime without torch, checked against torch's."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import math
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from toolkit import launch
from toolkit.checkpoint.convert.model_files import DECISIONS
from toolkit.config import ModelSettings, TaskSettings, TextSettings, build, fields_of, sections_of, tasks
from toolkit.data.labels import USUAL, Labels
from toolkit.data.prepare import prepare_data, split_of_texts
from toolkit.data.read import find_columns, read_file
from toolkit.data.rows import text_column, texts_of
from toolkit.data.tokens import LengthBuckets, Split, choose_max_length, load_tokenizer, separator_of
from toolkit.demo import model_path
from toolkit.errors import UserError, first_line
from toolkit.evaluation.answers import ClassAnswers, labels_of, saved_answers
from toolkit.evaluation.outputs import predict
from toolkit.evaluation.saved_model import quoting_of_run
from toolkit.models.classifier import load_saved_classifier
from toolkit.models.exported import FILES, INPUTS, ExportedClassifier, exported_to, require_packages
from toolkit.pretrained import load_config, quiet_transformers
from toolkit.utils.files import replace_folder, writing

_PACKAGES = {("openvino", False): ["openvino"], ("openvino", True): ["openvino", "nncf"],
             ("onnx", False): ["onnx", "onnxruntime"], ("onnx", True): ["onnx", "onnxruntime", "nncf"]}  # fmt: skip
_CALIBRATION = 300  # texts
_OPSET = 17
_SMOOTHING = 0.8
"""How much of what is hard to round NNCF moves from the activations into the weights (SmoothQuant's alpha, Xiao et al.,
2023). With its own 0.95 fewer answers stay the same: of a MiniLM 98.7 % in place of 99.4 %."""


def export(options: Any) -> None:
    """Writes the folder `options.out`, whole or not at all. `options` holds the arguments of `toolkit export`.

    Raises UserError for a model that cannot be exported, and where the exported one's answers are not the model's.
    """
    out = Path(options.out)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("toolkit export runs in one process: start it without a launcher")
    if os.path.lexists(out):
        raise UserError(f"{out} exists: name another folder, nothing is overwritten")
    require_packages(options.to, *_PACKAGES[options.to, options.int8])
    model = _exportable(options.model)
    tokenizer = load_tokenizer(ModelSettings(model_name_or_path=options.model))
    labels = labels_of(model.config)
    calibration, validation, known = _samples(options, tokenizer, model, labels)
    accelerator = launch.make_accelerator("no")
    with writing(out), replace_folder(out) as draft, quiet_transformers():
        try:
            with _quiet():
                _WAYS[options.to](model, draft, _texts(calibration, model) if options.int8 else [])
        except Exception as error:  # each converter has its own
            said = f"{type(error).__name__}: {first_line(error)[:300]}"
            raise UserError(f"--to {options.to} cannot take this {type(model).__name__} [{said}]") from error
        expected = _logits(accelerator, model, validation, tokenizer)
        found = _logits(accelerator, ExportedClassifier(draft, model.config), validation, tokenizer)
        decide = saved_answers(options.model, model.config).adjusted
        said, losses = compare(decide(expected), decide(found), validation.labels if known else None, labels)
        said = f"{said}, on {len(validation)} rows of {validation.name}"
        too_much = {name: points for name, points in losses.items() if points > getattr(options, name)}
        if too_much:
            allowed = " and ".join(f"--{name} {getattr(options, name):g}" for name in too_much)
            passes = " ".join(f"--{name} {math.ceil(100 * points - 1e-6) / 100:g}" for name, points in too_much.items())
            raise UserError(
                f"the exported model does not answer as {options.model}: {said}; {allowed} allow less, nothing was "
                f"written. To accept this, pass {passes}"
            )
        _finish(draft, Path(model_path(options.model)), model, tokenizer, options, said)
    print(f"{said}\nwrote {out}: toolkit predict {out} FILE")


def _exportable(name: str) -> Any:
    """The classifier, in float32. Raises UserError where it cannot be exported."""
    named = ModelSettings(model_name_or_path=name)
    if kind := exported_to(Path(model_path(name))):
        raise UserError(f"{name} is exported to {kind} already: name the model that it was made of")
    config = load_config(named)
    if not isinstance(saved_answers(name, config), ClassAnswers):
        raise UserError(f"{name} writes titles: toolkit export takes classifiers and regressions")
    if LengthBuckets.of_model(config):
        raise UserError(
            f"{name} is a BigBird with block-sparse attention, which neither OpenVINO nor ONNX Runtime has: "
            "toolkit predict computes it with torch"
        )
    return load_saved_classifier(named).eval()


# what it is calibrated on and checked with


def _samples(options: Any, tokenizer: Any, model: Any, labels: Labels) -> tuple[Split | None, Split, bool]:
    """(training texts, validation texts, whether their labels are known): of the files, or of the model's run."""
    calibration, validation = (
        _split_of(file, options, tokenizer, model, labels) if file else None
        for file in (options.calibration_file, options.validation_file)
    )
    if validation is None or (options.int8 and calibration is None):
        data = _data_of_run(options.model, tokenizer, model)
        if data and tuple(data.labels.names) != tuple(labels.names):
            raise UserError(f"the data of {options.model}'s run have other classes now: name --validation_file")
        missing = ["--validation_file"] * (validation is None)
        missing += ["--calibration_file"] * (options.int8 and calibration is None)
        if data is None:
            raise UserError(
                f"{options.model} is not in the folder of a run, which names its data: pass {' and '.join(missing)}"
            )
        calibration, validation = calibration or (data.train, True), validation or (data.validation, True)
    return calibration[0] if calibration else None, *validation


def _data_of_run(name: str, tokenizer: Any, model: Any) -> Any:
    """The data that the model's run learned from, as it read them; None where the folder is in no run's."""
    try:
        run = json.loads((Path(name).parent / "config.json").read_text(encoding="utf-8"))
        kept, recipe = run["settings"] | {"max_length": run["data"]["max_length"]}, run["identity"]["recipe"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    task = tasks().get(recipe, TaskSettings)
    fields = {key: field for part in sections_of(task).values() for key, field in fields_of(part).items()}
    given = {key: kept[key] for key, field in fields.items() if key in kept and kept[key] != field.default}
    return prepare_data(build(task, given), tokenizer, model.config)


def _split_of(file: str, options: Any, tokenizer: Any, model: Any, labels: Labels) -> tuple[Split, bool]:
    table = read_file(file, TextSettings(quoting=quoting_of_run(options.model, file)))
    found = find_columns(table, options.label_column, USUAL, "label_column")
    column = text_column(table, options.text_column, [*found, options.text_pair])
    texts, pairs = (
        [text for block in texts_of(table, name, separator_of(tokenizer)) for text in block] if name else None
        for name in (column, options.text_pair)
    )
    assert texts is not None
    max_length = choose_max_length(options.max_length, tokenizer, model.config, pairs is not None)
    split = split_of_texts(table.name, tokenizer, model.config, max_length, texts, pairs)
    truth = replace(labels, columns=found).encode(table, split.rows) if found else split.labels
    return replace(split, labels=truth), bool(found)


def _texts(split: Split | None, model: Any) -> list[dict[str, np.ndarray]]:
    """Some of them, evenly taken, each without padding, as the model's inputs, (1, S) int64."""
    assert split is not None
    places = np.linspace(0, len(split) - 1, min(_CALIBRATION, len(split))).astype(int)
    found = []
    for place in places:
        ids = split.tokens(int(place))[None].astype(np.int64)
        types = ids * 0 if split.token_types is None else split.token_types[split.span(int(place))][None]
        found.append({"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": types.astype(np.int64)})
    names = _inputs_of(model)
    return [{name: text[name] for name in names} for text in found]


def _logits(accelerator: Any, model: torch.nn.Module, split: Split, tokenizer: Any) -> np.ndarray:
    model = accelerator.prepare_model(model, evaluation_mode=True)
    found = predict(accelerator, model, split, tokenizer, 64, 16384)
    assert found is not None
    return found


def compare(
    expected: np.ndarray, found: np.ndarray, truth: np.ndarray | None, labels: Labels
) -> tuple[str, dict[str, float]]:
    """Two times (N, C) logits that decide (the greatest, or those above 0), and the labels where they are known -> what
    to report, and what the exported model loses, in points of 100, by the option that limits it: accuracy (`max_drop`)
    and answers that are others (`max_changed`).

    Of numbers, `max_drop` limits the share of their variance that the exported model loses.
    """
    if labels.problem_type == "regression":
        spread = np.square(expected - expected.mean(axis=0)).sum(axis=0)
        kept = 100 * (1 - np.square(found - expected).sum(axis=0) / np.maximum(spread, 1e-12)).min()
        return f"{kept:.2f} % of the variance of its numbers is the same", {"max_drop": 100 - kept}
    single = labels.problem_type == "single_label_classification"
    answers = [logits.argmax(axis=1)[:, None] if single else logits > 0 for logits in (expected, found)]
    same = 100 * float((answers[0] == answers[1]).all(axis=1).mean())
    line, losses = f"{same:.2f} % of the answers are the same", {"max_changed": 100 - same}
    if truth is None:
        return line, losses
    true = truth.reshape(len(truth), -1)
    before, after = (100 * float((each == true).all(axis=1).mean()) for each in answers)
    return f"accuracy {after:.2f} % (torch {before:.2f} %), {line}", {"max_drop": before - after, **losses}


# the converters


class _Plain(torch.nn.Module):
    """Tensors in, logits out, as the converters trace it."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.names, tensors, strict=True))).logits


def _inputs_of(model: Any) -> list[str]:
    """Those of INPUTS that the model takes."""
    takes = inspect.signature(model.forward).parameters
    return [name for name in INPUTS if name in takes]


def _traced(model: Any) -> tuple[_Plain, list[str], tuple[torch.Tensor, ...]]:
    names = _inputs_of(model)
    ones = torch.ones(2, 16, dtype=torch.long)
    mask = ones.clone()
    mask[0, 9:] = 0  # one that hides something, or it would be left out
    return (
        _Plain(model, names).eval(),  # or the exporter would put the model into the wrapper's mode, with dropout
        names,
        tuple({"input_ids": ones, "attention_mask": mask}.get(n, ones * 0) for n in names),
    )


def _to_openvino(model: Any, folder: Path, texts: list[dict[str, np.ndarray]]) -> None:
    import openvino

    plain, names, example = _traced(model)
    graph = openvino.convert_model(plain, example_input=example, input=[openvino.PartialShape([-1, -1])] * len(names))
    for port, name in zip(graph.inputs, names, strict=True):
        port.get_tensor().set_names({name})
    graph.outputs[0].get_tensor().set_names({"logits"})
    if texts:
        graph = _to_int8(graph, texts)
    openvino.save_model(graph, folder / FILES["openvino"], compress_to_fp16=False)


def _to_onnx(model: Any, folder: Path, texts: list[dict[str, np.ndarray]]) -> None:
    import onnx

    plain, names, example = _traced(model)
    file = folder / FILES["onnx"]
    axes = {name: {0: "batch", 1: "length"} for name in names} | {"logits": {0: "batch"}}
    torch.onnx.export(plain, example, file, input_names=names, output_names=["logits"], dynamic_axes=axes,
                      opset_version=_OPSET, dynamo=False)  # fmt: skip
    if texts:
        onnx.save(_to_int8(onnx.load(file), texts), file)


def _to_int8(graph: Any, texts: list[dict[str, np.ndarray]]) -> Any:
    import nncf
    from nncf.quantization import advanced_parameters as advanced

    smoothing = advanced.AdvancedSmoothQuantParameters(matmul=_SMOOTHING)
    more = advanced.AdvancedQuantizationParameters(smooth_quant_alphas=smoothing)
    return nncf.quantize(graph, nncf.Dataset(texts), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(texts),
                         advanced_parameters=more)  # fmt: skip


_WAYS = {"openvino": _to_openvino, "onnx": _to_onnx}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the converters' bars and pages of notes, and without what openvino and nncf tell Google of their use."""
    logging.getLogger("nncf").setLevel(logging.ERROR)
    said_nothing = mock.patch.dict(os.environ, {"CI": "true", "NNCF_CI": "1"})
    with said_nothing, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


# what stands beside the graph


def _finish(draft: Path, source: Path, model: Any, tokenizer: Any, options: Any, said: str) -> None:
    """config.json with the label names, the tokenizer, what the model's folder decides by, and its card."""
    model.config.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    if (source / DECISIONS).is_file():
        shutil.copyfile(source / DECISIONS, draft / DECISIONS)
    card = source / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else f"# {source.name}\n"
    made = " and ".join(f"{name} {version(name)}" for name in _PACKAGES[options.to, options.int8])
    kind = f"{'int8' if options.int8 else 'float32'}, in {FILES[options.to]}"
    (draft / "README.md").write_text(
        f"{text}\n## Exported\n\nThe model above as {options.to} reads it ({kind}), made with {made}. Checked against "
        f"torch: {said}. `toolkit predict` takes this folder; a plain script that reads it is in docs/export.md of "
        "finetune-toolkit.\n",
        encoding="utf-8",
    )
