"""`toolkit export MODEL OUT --to openvino|onnx`: exports a classifier and compares its predictions with torch."""

from __future__ import annotations

import contextlib
import inspect
import io
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

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache

from toolkit import launch
from toolkit.config import TaskSettings, TextSettings, build, fields_of, sections_of, tasks
from toolkit.data.labels import Labels
from toolkit.data.prepare import prepare_data
from toolkit.data.read import read_file
from toolkit.data.tokens import LengthBuckets, Split
from toolkit.demo import model_path
from toolkit.errors import UserError, first_line
from toolkit.evaluation.answers import DECISIONS, ClassAnswers
from toolkit.evaluation.saved_model import (
    SavedModel,
    choose_columns,
    choose_labels,
    training_quoting,
    training_run,
)
from toolkit.features.export.runtimes import FILES, INPUTS, export_format, no_statistics
from toolkit.pretrained import quiet_transformers
from toolkit.utils.extras import require_extra
from toolkit.utils.files import explain_write_errors, replace_folder

_PACKAGES = {"openvino": ["openvino"], "onnx": ["onnx", "onnxruntime"]}
_CALIBRATION_TEXTS = 300
_BATCH = (64, 16384)  # rows, tokens
_OPSET = 17
_SMOOTHING = 0.8
"""SmoothQuant's alpha (Xiao et al., 2023). With NNCF's default 0.95 a MiniLM keeps 98.7 % of its predictions, with 0.8
99.4 %."""


def export(options: Any) -> None:
    """Writes the folder `options.out` atomically. `options` holds the arguments of `toolkit export`.

    Raises UserError for a model that cannot be exported, and if too many predictions of the exported model differ.
    """
    out, source = Path(options.out), Path(model_path(options.model))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("toolkit export runs in one process: start it without a launcher")
    if os.path.lexists(out):
        raise UserError(f"{out} exists: name another folder, nothing is overwritten")
    if options.calibration_file and not options.int8:
        raise UserError("--calibration_file has no effect without --int8")
    for name in ("text_column", "text_pair", "label_column"):
        if getattr(options, name) and not (options.validation_file or options.calibration_file):
            raise UserError(
                f"--{name} has no effect without --validation_file: the run names the columns of its data"
            )
    require_extra(options.to, options.to, *_packages(options))
    saved, answers = _open_model(options.model)
    max_length = saved.choose_max_length(options.max_length, bool(options.text_pair))
    saved.load(launch.make_accelerator("no"), max_length, *_BATCH)
    calibration, validation, has_labels = _load_texts(options, saved)
    before = answers.adjust_logits(saved.compute_outputs(validation))
    model = saved.model.cpu()
    convert = {"openvino": _to_openvino, "onnx": _to_onnx}[options.to]
    with explain_write_errors(out), replace_folder(out) as draft, quiet_transformers():
        try:
            with _quiet():
                convert(
                    model, draft, _calibration_inputs(calibration, model) if options.int8 else []
                )
        except Exception as error:  # each converter raises its own
            reason = f"{type(error).__name__}: {first_line(error)[:300]}"
            raise UserError(
                f"--to {options.to} cannot take this {type(model).__name__} [{reason}]"
            ) from error
        model.config.save_pretrained(draft)  # with the label names
        saved.tokenizer.save_pretrained(draft)
        # of a model of the hub `SavedModel` has cached it
        decisions = (
            source / DECISIONS
            if source.is_dir()
            else try_to_load_from_cache(str(source), DECISIONS)
        )
        if Path(str(decisions)).is_file():
            shutil.copyfile(str(decisions), draft / DECISIONS)
        exported = SavedModel(str(draft))
        exported.load(saved.accelerator, saved.max_length, *_BATCH)
        after = answers.adjust_logits(exported.compute_outputs(validation))
        result, losses = compare(
            before, after, validation.labels if has_labels else None, answers.labels
        )
        result = f"{result}, on {len(validation)} rows of {validation.name}"
        too_much = {
            name: points for name, points in losses.items() if points > getattr(options, name)
        }
        if too_much:
            allowed = " and ".join(f"--{name} {getattr(options, name):g}" for name in too_much)
            passes = " ".join(
                f"--{name} {math.ceil(100 * points - 1e-6) / 100:g}"
                for name, points in too_much.items()
            )
            raise UserError(
                f"{out} was not written: {result}, which exceeds {allowed}; to accept this, pass {passes}"
            )
        _write_card(draft, source, options, result)
    print(f"{result}\nwrote {out}: toolkit predict {out} FILE")


def _packages(options: Any) -> list[str]:
    return [*_PACKAGES[options.to], *["nncf"] * options.int8]


def _open_model(name: str) -> tuple[SavedModel, ClassAnswers]:
    """Raises UserError for a model that cannot be exported."""
    if kind := export_format(Path(model_path(name))):
        raise UserError(f"{name} is already exported to {kind}: name the original model")
    saved = SavedModel(name)
    if not isinstance(saved.answers, ClassAnswers):
        raise UserError(f"{name} writes titles: toolkit export takes classifiers and regressions")
    if LengthBuckets.of_model(saved.config):
        why = "which neither OpenVINO nor ONNX Runtime has: toolkit predict computes it with torch"
        raise UserError(f"{name} is a BigBird with block-sparse attention, {why}")
    return saved, saved.answers


# The texts for calibration and comparison


def _load_texts(options: Any, saved: Any) -> tuple[Split | None, Split, bool]:
    """(training texts for 8 bits, validation texts, whether these have labels), from the files or the model's run."""
    names = ["validation_file", *["calibration_file"] * options.int8]
    splits = {
        name: _read_split(file, options, saved)
        for name in names
        if (file := getattr(options, name))
    }
    if missing := [f"--{name}" for name in names if name not in splits]:
        data = _training_data(options.model, saved, options.max_length)
        if data is None:
            why = "is in no run folder that names its data"
            raise UserError(f"{options.model} {why}: pass {' and '.join(missing)}")
        if tuple(data.labels.names) != tuple(saved.answers.labels.names):
            raise UserError(
                f"the data of {options.model}'s run have other classes now: pass --validation_file"
            )
        splits = {
            "validation_file": (data.validation, True),
            "calibration_file": (data.train, True),
        } | splits
    return splits["calibration_file"][0] if options.int8 else None, *splits["validation_file"]


def _training_data(name: str, saved: Any, max_length: int | None) -> Any:
    """The data of the run that trained the model; None if the model is not in a run folder."""
    run = training_run(name)
    if not run["identity"]:
        return None
    settings = run["settings"] | {"max_length": max_length or run["data"].get("max_length")}
    if Path(
        folder := run["launch"].get("folder", "")
    ).is_dir():  # relative paths are of that working directory
        names = ["train_file", "validation_file", "test_file", "label_names_file"]
        settings |= {
            name: str(Path(folder, settings[name])) for name in names if settings.get(name)
        }
    task = tasks().get(run["identity"].get("recipe"), TaskSettings)
    fields = {
        key: field for part in sections_of(task).values() for key, field in fields_of(part).items()
    }
    known = {
        key: settings[key]
        for key, field in fields.items()
        if settings.get(key, field.default) != field.default
    }
    return prepare_data(build(task, known), saved.tokenizer, saved.config)


def _read_split(file: str, options: Any, saved: Any) -> tuple[Split, bool]:
    """(the texts of a file, whether it has labels)."""
    table = read_file(file, TextSettings(quoting=training_quoting(options.model, file)))
    column, pair = choose_columns(
        options.model, table, options.text_column, options.text_pair, options.label_column
    )
    pairs = saved.read_texts(table, pair) if pair else None
    split = replace(saved.tokenize(saved.read_texts(table, column), pairs), name=table.name)
    if labels := choose_labels(options.model, table, options.label_column, saved.answers.labels):
        split = replace(split, labels=labels.encode(table))
    return split, labels is not None


def _calibration_inputs(split: Split | None, model: Any) -> list[dict[str, np.ndarray]]:
    """The model's inputs, (1, S) int64, for evenly spaced texts without padding."""
    assert split is not None
    texts = []
    for row in (
        np.linspace(0, len(split) - 1, min(_CALIBRATION_TEXTS, len(split))).astype(int).tolist()
    ):
        ids = split.tokens(row)[None].astype(np.int64)
        types = ids * 0 if split.token_types is None else split.token_types[split.span(row)][None]
        inputs = {
            "input_ids": ids,
            "attention_mask": ids * 0 + 1,
            "token_type_ids": types.astype(np.int64),
        }
        texts.append({name: inputs[name] for name in _inputs_of(model)})
    return texts


def compare(
    before: np.ndarray, after: np.ndarray, truth: np.ndarray | None, labels: Labels
) -> tuple[str, dict[str, float]]:
    """Compares (N, C) scores of torch and of the exported model, whose argmax or sign is the prediction -> a sentence,
    and the losses in percentage points by the option that limits them: of accuracy (`max_drop`, needs labels; for
    regression of the explained variance of torch's numbers) and changed predictions (`max_changed`)."""
    if labels.problem_type == "regression":
        spread = np.square(before - before.mean(axis=0)).sum(axis=0)
        same = 100 * (1 - np.square(after - before).sum(axis=0) / np.maximum(spread, 1e-12)).min()
        return f"{same:.2f} % of the variance of its numbers is the same", {"max_drop": 100 - same}
    single = labels.problem_type == "single_label_classification"
    answers = [
        logits.argmax(axis=1)[:, None] if single else logits > 0 for logits in (before, after)
    ]
    same = 100 * float((answers[0] == answers[1]).all(axis=1).mean())
    result, losses = f"{same:.2f} % of the answers are the same", {"max_changed": 100 - same}
    if truth is None:
        return result, losses
    torchs, exported = (
        100 * float((each == truth.reshape(len(truth), -1)).all(axis=1).mean()) for each in answers
    )
    return f"accuracy {exported:.2f} % (torch {torchs:.2f} %), {result}", {
        "max_drop": torchs - exported,
        **losses,
    }


# The converters


class _LogitsOnly(torch.nn.Module):
    """A model that returns a tensor, which the converters can trace."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.names, tensors, strict=True))).logits


def _inputs_of(model: Any) -> list[str]:
    parameters = inspect.signature(model.forward).parameters
    return [name for name in INPUTS if name in parameters]


def _traceable(model: Any) -> tuple[_LogitsOnly, list[str], tuple[torch.Tensor, ...]]:
    """(module, names of its inputs, example inputs)."""
    names = _inputs_of(model)
    example = {name: torch.zeros(2, 16, dtype=torch.long) for name in names}
    example["input_ids"] += 1
    example["attention_mask"] += 1
    example["attention_mask"][0, 9:] = 0  # tracing would drop a mask of ones
    # the exporter sets the model to its wrapper's mode
    return _LogitsOnly(model, names).eval(), names, tuple(example.values())


def _to_openvino(model: Any, folder: Path, texts: list[dict[str, np.ndarray]]) -> None:
    import openvino

    module, names, example = _traceable(model)
    graph = openvino.convert_model(
        module, example_input=example, input=[openvino.PartialShape([-1, -1])] * len(names)
    )
    for port, name in zip(graph.inputs, names, strict=True):
        port.get_tensor().set_names({name})
    graph.outputs[0].get_tensor().set_names({"logits"})
    if texts:
        graph = _to_int8(graph, texts)
    openvino.save_model(graph, folder / FILES["openvino"], compress_to_fp16=False)


def _to_onnx(model: Any, folder: Path, texts: list[dict[str, np.ndarray]]) -> None:
    import onnx

    module, names, example = _traceable(model)
    file = folder / FILES["onnx"]
    axes = {name: {0: "batch", 1: "length"} for name in names} | {"logits": {0: "batch"}}
    torch.onnx.export(module, example, file, input_names=names, output_names=["logits"], dynamic_axes=axes,
                      opset_version=_OPSET, dynamo=False)  # fmt: skip
    if texts:
        onnx.save(_to_int8(onnx.load(file), texts), file)


def _to_int8(graph: Any, texts: list[dict[str, np.ndarray]]) -> Any:
    import nncf
    from nncf.quantization import advanced_parameters as advanced

    smoothing = advanced.AdvancedSmoothQuantParameters(matmul=_SMOOTHING)
    parameters = advanced.AdvancedQuantizationParameters(smooth_quant_alphas=smoothing)
    return nncf.quantize(graph, nncf.Dataset(texts), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(texts),
                         advanced_parameters=parameters)  # fmt: skip


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the converters."""
    logging.getLogger("nncf").setLevel(logging.ERROR)
    with no_statistics(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _write_card(draft: Path, source: Path, options: Any, result: str) -> None:
    """The model's card, with a section about the export."""
    card = source / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else f"# {source.name}\n"
    packages = " and ".join(f"{name} {version(name)}" for name in _packages(options))
    kind = f"{'int8' if options.int8 else 'float32'}, in {FILES[options.to]}"
    (draft / "README.md").write_text(
        f"{text}\n## Exported\n\nThe model above for {options.to} ({kind}), made with {packages}. Compared "
        f"with torch: {result}. `toolkit predict` takes this folder; docs/export.md of finetune-toolkit has a script "
        "that needs only the runtime.\n",
        encoding="utf-8",
    )
