"""Settings: frozen dataclasses, one per section, filled from a YAML file and the command line.

A recipe's settings are a dataclass whose fields are sections; the names of all their fields share
one flat name space, so that `--learning_rate 3e-5` and `learning_rate: 3e-5` need no prefix.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from toolkit.errors import Faults, UserError, did_you_mean

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
SchedulerName = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
]

_STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ModelSettings:
    """The pretrained model and how it is adapted."""

    model_name_or_path: str | None = None
    """A folder or a hub name that `AutoModelForSequenceClassification` loads."""
    problem_type: ProblemType | None = None
    """What the labels mean; found from the label column when not given."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Overrides every dropout probability of the model, and LoRA's."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    attn_implementation: str | None = None
    """`sdpa`, `eager`, `flash_attention_2`, ...: as in `from_pretrained`."""
    lora_r: int | None = Field(default=None, ge=1)
    """The rank of LoRA, 8 or 16 usually: only small added matrices and the head are trained. Off when not given."""
    lora_alpha: int | None = Field(default=None, ge=1)
    """What LoRA adds is scaled by lora_alpha / lora_r; twice the rank when not given."""
    lora_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Of the input of LoRA's matrices; 0 when not given, and what `dropout` says where that is given."""
    lora_target_modules: str | None = None
    """Layers with LoRA, `query,value` or `all-linear`; peft's choice for the architecture when not given."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DataSettings:
    """Where the texts and labels are."""

    train_file: str | None = None
    """CSV, TSV, JSON, JSONL or Parquet, plain or compressed (.gz)."""
    validation_file: str | None = None
    """Evaluated during training; without it a part of the training rows is held back."""
    test_file: str | None = None
    """Evaluated once, at the end, with the best model."""
    dataset_name: str | None = None
    """A data set on the hub, or a folder `datasets.load_dataset` reads; instead of the files."""
    dataset_config_name: str | None = None
    """The configuration of `dataset_name`."""
    text_column: str | None = None
    """Found by its name or as the only text column when not given."""
    label_column: str | None = None
    """Found by its name when not given. Several 0/1 columns, `a,b,c`, mean multi-label."""
    encoding: str = "utf-8"
    """Of CSV, TSV and JSON files; `gb18030` for GBK files."""
    validation_split: float = Field(default=0.1, gt=0, lt=1)
    """The part of the training rows that is held back when there is no validation file."""
    drop_empty_text: bool = False
    """Leave out rows whose text is empty or blank; otherwise they are an error."""
    max_length: int | None = Field(default=None, ge=2)
    """Tokens; longer texts are cut. The model's own limit when not given."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TrainingSettings:
    """The optimization and what a run keeps."""

    output_dir: str | None = None
    """The run's folder; a new one under runs/ when not given."""
    overwrite_output_dir: bool = False
    """Where the folder holds a run, move that run aside (to NAME.old-TIME) instead of stopping."""
    num_train_epochs: float = Field(default=3.0, gt=0)
    """Passes over the training rows."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps; overrides the number of epochs."""
    global_batch_size: int = Field(default=32, ge=1)
    """Samples per optimizer step, over all processes and micro-batches."""
    per_device_batch_size: int = Field(default=32, ge=1)
    """The most samples of one micro-batch on one process; accumulation follows from it."""
    per_device_eval_batch_size: int | None = Field(default=None, ge=1)
    """The most samples of one evaluation batch; twice the training one when not given."""
    group_by_length: bool = True
    """Put texts of similar length into the same batch."""
    learning_rate: float = Field(default=5e-5, gt=0)
    """The peak learning rate of AdamW."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled decay of the weights; biases and norms have none."""
    warmup_ratio: float | None = Field(default=None, ge=0, le=1)
    """The part of all optimizer steps that warms up."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Optimizer steps that warm up; instead of the ratio."""
    lr_scheduler_type: SchedulerName = "linear"
    """The schedule after the warm-up, counted in optimizer steps."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Clips the norm of the whole gradient; 0 turns clipping off."""
    label_smoothing_factor: float = Field(default=0.0, ge=0, lt=1)
    """For single-label classification."""
    seed: int = Field(default=42, ge=0)
    """Of the split, the order of samples, the new head and dropout."""
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    """What the accelerate config says, or `no`, when not given."""
    eval_every: int | None = Field(default=None, ge=1)
    """Optimizer steps between evaluations; once an epoch when not given."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Optimizer steps between checkpoints; only when the run is told to stop, when not given."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """The newest checkpoints are kept, so many, and the best one."""
    checkpoint_in_background: bool = False
    """Copy the state in memory and write it while training goes on: three more copies of the weights."""
    resume: Literal["auto", "no"] | str = "auto"
    """auto: go on from the newest complete checkpoint in output_dir; no; or a checkpoint's folder."""
    metric_for_best_model: str | None = None
    """Any number of eval.jsonl; macro F1, micro F1 (multi-label) or the loss (regression) when not given."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """Stop after so many evaluations without a better metric."""
    report_to: str = "tensorboard"
    """Trackers, comma-separated: tensorboard, wandb, mlflow, swanlab, trackio, or none."""


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Everything a recipe on labelled texts can be told."""

    model: ModelSettings
    data: DataSettings
    training: TrainingSettings


Settings = TypeVar("Settings")

_NO_VALUE = object()
# two ways to say one thing, and why both cannot be meant
_EXCLUSIVE = [
    ("train_file", "dataset_name", "name the files or the data set"),
    ("validation_file", "dataset_name", "a data set brings its own splits"),
    ("test_file", "dataset_name", "a data set brings its own splits"),
    ("warmup_ratio", "warmup_steps", "they set the same thing"),
    ("validation_file", "validation_split", "rows are only held back when there is no validation file"),
]


def parse(
    settings_class: type[Settings],
    argv: Sequence[str] | None = None,
    demo: Path | None = None,
    description: str | None = None,
) -> Settings:
    """`[FILE.yaml] --name value ...` -> settings; the command line wins over the file.

    Where neither names data or a model, the settings file `demo` fills what was not given. Raises
    UserError with every fault at once: unknown names (with the nearest known one), values of the wrong
    type or out of range.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    faults = Faults()
    sections = sections_of(settings_class)
    given: dict[str, Any] = {}
    if arguments and not arguments[0].startswith("-"):
        given = _from_yaml(Path(arguments.pop(0)), sections, faults)
    given = _over(given, _from_command_line(arguments, sections, faults, description))
    if demo:
        given = _with_demo(given, demo, sections, faults)
    return build(settings_class, given, faults)


def _with_demo(given: dict[str, Any], demo: Path, sections: Mapping[str, type], faults: Faults) -> dict[str, Any]:
    named = [name for name in ("train_file", "dataset_name", "model_name_or_path") if given.get(name) is not None]
    if not named and not any(given.get(name) for name in ("validation_file", "test_file")):
        return _over(_from_yaml(demo, sections, faults), given)
    if named and "model_name_or_path" not in named:
        faults.add("no model is named: pass --model_name_or_path FOLDER_OR_HUB_NAME (bert-base-chinese, ...)")
    elif named == ["model_name_or_path"]:
        faults.add("no data is named: pass --train_file FILE or --dataset_name NAME")
    return given


def _over(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Two layers of settings: what the upper one chooses also replaces the lower one's other way to say it."""
    replaced = {
        loser
        for one, other, _ in _EXCLUSIVE
        for winner, loser in ((one, other), (other, one))
        if upper.get(winner) is not None and upper.get(loser) is None
    }
    return {**{name: value for name, value in lower.items() if name not in replaced}, **upper}


def build(settings_class: type[Settings], given: Mapping[str, Any], faults: Faults | None = None) -> Settings:
    """A flat mapping of settings -> the validated dataclass. Raises UserError with all faults."""
    faults = faults or Faults()
    sections = sections_of(settings_class)
    built: dict[str, Any] = {}
    for name, section in sections.items():
        own = {key: given[key] for key in _names(section) if key in given}
        try:
            built[name] = TypeAdapter(section).validate_python(own)
        except ValidationError as error:
            for fault in error.errors():
                faults.add(_explain(fault))
    contradictions(given, faults)
    faults.raise_if_any()
    return settings_class(**built)


def contradictions(given: Mapping[str, Any], faults: Faults) -> None:
    """Adds a fault for each pair of given settings that cannot both be meant."""
    for one, other, why in _EXCLUSIVE:
        if given.get(one) is not None and given.get(other) is not None:
            faults.add(f"--{one} and --{other} contradict each other ({why}): give one of them")
    if given.get("lr_scheduler_type") == "constant" and (given.get("warmup_steps") or given.get("warmup_ratio")):
        faults.add("--lr_scheduler_type constant has no warm-up: use constant_with_warmup, or leave warmup_steps out")
    smoothed = given.get("label_smoothing_factor")
    if smoothed and given.get("problem_type") in ("regression", "multi_label_classification"):
        faults.add(f"--label_smoothing_factor {smoothed} means nothing for --problem_type {given['problem_type']}")
    for needs in ("validation_file", "test_file"):
        alone = given.get("train_file") is None and given.get("dataset_name") is None
        if given.get(needs) is not None and alone:
            faults.add(f"--{needs} is given without --train_file: name the file to train on")
    if given.get("dataset_config_name") is not None and given.get("dataset_name") is None:
        faults.add("--dataset_config_name is given without --dataset_name")
    for needs in ("lora_alpha", "lora_dropout", "lora_target_modules"):
        if given.get(needs) is not None and given.get("lora_r") is None:
            faults.add(f"--{needs} is given without --lora_r, which turns LoRA on: give it (8 is usual)")


def sections_of(settings_class: type) -> dict[str, type]:
    """Field name -> section class, in order."""
    hints = get_type_hints(settings_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(settings_class)}


def flat(settings: Any) -> dict[str, Any]:
    """Settings -> one flat dict, as config.json and trackers keep it."""
    merged: dict[str, Any] = {}
    for name in sections_of(type(settings)):
        merged.update(dataclasses.asdict(getattr(settings, name)))
    return merged


def _names(section: type) -> list[str]:
    return [field.name for field in dataclasses.fields(section)]


def _from_yaml(path: Path, sections: Mapping[str, type], faults: Faults) -> dict[str, Any]:
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"{path} is not a YAML file of settings: settings are given as --name value")
    if not path.is_file():
        raise UserError(f"there is no settings file {path} (looked in {Path.cwd()})")
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _OnceLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise UserError(f"{path} must hold lines of `name: value`, and holds a {type(loaded).__name__}")
    fields = {name: field for section in sections.values() for name, field in _fields(section).items()}
    for name in loaded:
        if name not in fields:
            faults.add(f"{path}: unknown setting {name}{did_you_mean(str(name), fields)}")
    return {name: _meant(name, value, fields[name], faults) for name, value in loaded.items() if name in fields}


class _OnceLoader(yaml.SafeLoader):
    """YAML that refuses a name given twice, where the first would be lost silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise yaml.YAMLError(f"{twice} is given twice")
        return super().construct_mapping(node, deep)


def _meant(name: str, value: Any, field: Any, faults: Faults) -> Any:
    """YAML 1.1 reads a bare `no` as false; a true or false where none belongs is a fault, not 1 or 0."""
    if not isinstance(value, bool) or field.annotation is bool:
        return value
    if value is False and "no" in str(field.annotation):
        return "no"
    faults.add(f"--{name} {str(value).lower()}: not a true or false")
    return None


def _fields(section: type) -> dict[str, Any]:
    """Name -> pydantic's field, which holds the docstring under it as its description."""
    return dict(section.__pydantic_fields__)  # type: ignore[attr-defined]


def _from_command_line(
    arguments: list[str], sections: Mapping[str, type], faults: Faults, description: str | None
) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [SETTINGS.yaml] [--name value ...]",
        description=description,
        epilog="To choose how it runs: --config_file accelerate_configs/NAME.yaml (with --num_processes, "
        "--machine_rank, --main_process_ip, --main_process_port), or --deepspeed_config under `deepspeed`.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
    )
    known = []
    for section in sections.values():
        group = parser.add_argument_group((section.__doc__ or "").rstrip("."))
        for name in _names(section):
            known.append(name)
            field = _fields(section)[name]
            text = (field.description or "").replace("%", "%%")
            default = "" if field.default is None else f" [{field.default}]"
            # a switch may stand alone, as in transformers: `--gradient_checkpointing`
            alone = "true" if field.annotation is bool else _NO_VALUE
            group.add_argument(f"--{name}", metavar="VALUE", help=text + default, nargs="?", const=alone)
    try:
        parsed, unknown = parser.parse_known_args(_join_negative_numbers(arguments))
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from error
    given = dict(vars(parsed))
    for name in [name for name, value in given.items() if value is _NO_VALUE]:
        faults.add(f"--{name} needs a value")
        del given[name]
    _add_unknown(unknown, known, faults)
    return given


def _join_negative_numbers(arguments: Sequence[str]) -> list[str]:
    """`--x -1e-5` -> `--x=-1e-5`: argparse takes a negative number with an exponent for a name."""
    joined: list[str] = []
    for token in arguments:
        if re.match(r"-\.?\d", token) and joined and re.fullmatch(r"--\w+", joined[-1]):
            joined[-1] += f"={token}"
        else:
            joined.append(token)
    return joined


def _add_unknown(tokens: Sequence[str], known: Sequence[str], faults: Faults) -> None:
    """A fault for each unknown name; the token behind it is its value, and no fault of its own."""
    value_follows = False
    for token in tokens:
        if token.startswith("--"):
            name = token[2:].split("=")[0]
            hint = did_you_mean(name.replace("-", "_"), known)
            faults.add(f"unknown setting --{name}{hint}; --help lists them all")
        elif not value_follows:
            faults.add(f"{token!r} is not a setting: settings are given as --name value")
        value_follows = token.startswith("--") and "=" not in token


def _explain(fault: Any) -> str:
    name = str(fault["loc"][0]) if fault["loc"] else "settings"
    message = fault["msg"].removeprefix("Value error, ")
    return f"--{name} {fault['input']!r}: {message[0].lower()}{message[1:]}"
