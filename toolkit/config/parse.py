"""Sections of settings (toolkit.config.sections), filled from a YAML file and the command line.

A recipe's settings are a dataclass whose fields are sections; the names of all their fields share
one flat name space, so that `--learning_rate 3e-5` and `learning_rate: 3e-5` need no prefix.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from toolkit.config.command_line import SWITCHES, command_line, joined
from toolkit.config.sections import TASKS
from toolkit.errors import Faults, UserError, did_you_mean
from toolkit.utils.plain_yaml import read_yaml

Settings = TypeVar("Settings")

_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
# two ways to say one thing, and why both cannot be meant
_EXCLUSIVE = [
    ("train_file", "dataset_name", "name the files or the data set"),
    ("validation_file", "dataset_name", "a data set brings its own splits"),
    ("test_file", "dataset_name", "a data set brings its own splits"),
    ("warmup_ratio", "warmup_steps", "they set the same thing"),
    *((name, "folds", "each fold is judged on its own part of the training rows")
      for name in ("validation_file", "test_file", "validation_split", "max_eval_samples")),
    *((name, "folds", "decisions are of one model, and folds are several")
      for name in ("tune_thresholds", "calibrate", "abstain_below")),
    ("validation_file", "validation_split", "rows are only held back when there is no validation file"),
]  # fmt: skip
# a setting -> the one without which it has no effect
_BELONGS_TO = {
    "dataset_config_name": ("dataset_name", ""),
    "positive_class": ("tune_thresholds", ", which it is for"),
    **dict.fromkeys(("distillation_temperature", "distillation_alpha"),
                    ("teacher", ", the model that teaches: name its folder")),
    **dict.fromkeys(("lora_alpha", "lora_dropout", "lora_target_modules"),
                    ("lora_r", ", which turns LoRA on: give it (8 is usual)")),
}  # fmt: skip
# what other trainers call it
_ELSEWHERE = {
    "per_device_train_batch_size": "global_batch_size", "train_batch_size": "global_batch_size",
    "gradient_accumulation_steps": "global_batch_size", "batch_size": "global_batch_size",
    "eval_steps": "eval_every", "save_steps": "checkpoint_every",
    "save_total_limit": "keep_checkpoints", "resume_from_checkpoint": "resume", "lr": "learning_rate",
    "epochs": "num_train_epochs", "bf16": "mixed_precision", "fp16": "mixed_precision", "optim": "optimizer",
    "max_seq_length": "max_length", "wd": "weight_decay", "patience": "early_stopping_patience",
}  # fmt: skip
# what other trainers have, and what is typed or done here instead
_INSTEAD = {
    "pooling": "a head that reads the mean of all tokens is a change of the recipe: docs/your-own-recipe.md, A model "
               "class of your own",
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config"),
                    "a strategy is a file: --config_file accelerate_configs/zero2.yaml (ddp, zero1, zero3, fsdp2), or "
                    "deepspeed recipes/cls.py --deepspeed_config ds.json"),
    "train_sampling_strategy": "texts of like length share a batch unless --group_by_length false; --sampling draws "
                               "rare classes more often",
    **dict.fromkeys(("save_strategy", "save_only_model"),
                    "--checkpoint_every 500 saves every 500 optimizer steps; the best model is always saved"),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy", "eval_on_start", "eval_delay"),
                    "each epoch is evaluated, or --eval_every 500 optimizer steps"),
    "load_best_model_at_end": "the best model by --metric_for_best_model is always the one that is saved and tested",
    **dict.fromkeys(("do_train", "do_eval", "do_predict"),
                    "a recipe always trains, and evaluates --validation_file and --test_file; for a saved model there "
                    "are toolkit evaluate and toolkit predict"),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"),
                    "--optimizer_args 'betas=(0.9,0.98),eps=1e-6'"),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
                     "dataloader_persistent_workers"),
                    "tokens are made ahead and read without copies: there are no workers to set"),
    "dataloader_drop_last": "no sample is dropped: the last batch is smaller",
    **dict.fromkeys(("logging_strategy", "logging_first_step"), "every optimizer step is logged; --logging_steps N "
                    "gathers N of them at once"),
    **dict.fromkeys(("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
                    "--gradient_checkpointing true takes no more"),
    "activation_checkpointing": "--gradient_checkpointing true",
    "auto_find_batch_size": "--per_device_batch_size auto",
    "label_names": "--label_column names the labels' column",
    **dict.fromkeys(("length_column_name", "use_cache", "enable_jit_checkpoint", "optim_target_modules",
                     "lr_scheduler_kwargs"), "it has no counterpart, and a run needs none"),
    **dict.fromkeys(("local_rank", "use_cpu", "no_cuda"), "the launch says it: the same file runs with GPUs and "
                    "without"),
    **dict.fromkeys(("push_to_hub", "hub_model_id"), "the run's model/ is a folder that can be uploaded as it is"),
}  # fmt: skip
_DATA = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt", ".gz")

_FILES: dict[str, Path] = {}
"""Settings of this process that a YAML file gave, with its name."""


def named_in(setting: str) -> str:
    """` (FILE.yaml names it)`, for an error about a setting that nobody typed."""
    return f" ({_FILES[setting]} names it)" if setting in _FILES else ""


def parse(
    settings_class: type[Settings],
    argv: Sequence[str] | None = None,
    demo: Path | None = None,
    description: str | None = None,
    program: str | None = None,
) -> Settings:
    """`[FILE.yaml] --name value ...` -> settings; the command line wins over the file.

    Where neither names data or a model, the settings file `demo` fills what was not given. Raises
    UserError with every fault at once: unknown names (with the nearest known one), values of the wrong
    type or out of range.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    faults = Faults()
    sections = sections_of(settings_class)
    fields = {section: fields_of(section) for section in sections.values()}
    parser = command_line(fields, "--help_all" in arguments, description, program)
    if {"-h", "--help", "--help_all"} & set(arguments):
        parser.print_help()
        raise SystemExit(0)
    given: dict[str, Any] = {}
    _FILES.clear()
    if arguments and not arguments[0].startswith("-"):
        file = Path(arguments.pop(0))
        given = _from_yaml(file, sections, faults)
        _FILES.update(dict.fromkeys(given, file))
    typed = _from_command_line(parser, arguments, [name for own in fields.values() for name in own], faults)
    for name in typed:
        _FILES.pop(name, None)
    given = _over(given, typed)
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
    known = [name for section in sections.values() for name in fields_of(section)]
    for name, value in given.items():
        if name not in known:
            faults.add(f"unknown setting {name}{_hint(name, known)}")
        if isinstance(value, str) and _UNWRITABLE.search(value):
            faults.add(f"--{name} {value!r}: it contains a character that cannot be written")
    for name, section in sections.items():
        own = {key: given[key] for key in fields_of(section) if key in given}
        try:
            built[name] = TypeAdapter(section).validate_python(own)
        except ValidationError as error:
            for fault in {fault["loc"][:1]: fault for fault in reversed(error.errors())}.values():
                faults.add(_explain(fault))  # the first of each setting: of a union each kind has one
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
        faults.add(f"--label_smoothing_factor {smoothed} has no effect with --problem_type {given['problem_type']}")
    if smoothed and given.get("loss") == "focal":
        faults.add(f"--label_smoothing_factor {smoothed} has no effect with --loss focal: leave one of them out")
    if given.get("focal_gamma") is not None and given.get("loss") != "focal":
        faults.add("--focal_gamma is given without --loss focal, which it belongs to")
    for needs in ("validation_file", "test_file"):
        alone = given.get("train_file") is None and given.get("dataset_name") is None
        if given.get(needs) is not None and alone:
            faults.add(f"--{needs} is given without --train_file: name the file to train on")
    _add_useless_comparison(given, faults)
    if str(given.get("num_beams")) == "1" and given.get("length_penalty") is not None:
        faults.add("--length_penalty has no effect with --num_beams 1: use more beams, or drop it")
    if given.get("folds") is not None:
        if given.get("output_dir") is None:
            faults.add("--folds needs --output_dir: the same command goes on there with the fold that is not finished")
        if str(given.get("overwrite_output_dir", False)).lower() == "true" or given.get("resume", "auto") != "auto":
            faults.add(
                "--folds goes on by itself: drop --overwrite_output_dir and --resume, or name another --output_dir"
            )
    for twice in ("r_drop_alpha", "fgm_epsilon"):
        if given.get(twice) is not None and given.get("teacher") is not None:
            faults.add(f"--teacher and --{twice} contradict each other (its second pass has no teacher): give one")
        if given.get(twice) is not None and given.get("per_device_batch_size") == "auto":
            faults.add(f"--per_device_batch_size auto measures one pass, and --{twice} takes two: give a number")
    for other in ("freeze_layers", "reinit_layers"):
        if given.get(other) is not None and given.get("lora_r") is not None:
            faults.add(f"--{other} and --lora_r contradict each other (LoRA trains its own matrices alone): give one")
    for name, (needed, why) in _BELONGS_TO.items():
        if given.get(name) is not None and given.get(needed) is None:
            faults.add(f"--{name} is given without --{needed}{why}")


def _add_useless_comparison(given: Mapping[str, Any], faults: Faults) -> None:
    compared, longest = given.get("compare_max_length"), given.get("max_length")
    with contextlib.suppress(TypeError, ValueError):  # a number may still be the command line's text
        if int(compared) >= int(longest):  # type: ignore[arg-type]
            faults.add(f"--compare_max_length {compared} is no less than --max_length {longest}: name fewer tokens")


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


def fields_of(section: type) -> dict[str, Any]:
    """Name -> pydantic's field, which holds the docstring under it as its description."""
    found: dict[str, Any] = {}
    for part in reversed(section.__mro__):  # an inherited field has its docstring in the class that it is written in
        fields = getattr(part, "__pydantic_fields__", {})
        found |= {name: field for name, field in fields.items() if field.description or name not in found}
    return found


def _from_yaml(path: Path, sections: Mapping[str, type], faults: Faults) -> dict[str, Any]:
    if path.suffix not in (".yaml", ".yml"):
        way = f"pass --train_file {path}" if path.suffix in _DATA else "settings are given as --name value"
        raise UserError(f"{path} is not a YAML file of settings: {way}")
    if not path.is_file():
        beside = [str(file) for file in path.parent.glob("*.yaml")]
        raise UserError(f"there is no settings file {path}{did_you_mean(str(path), beside)} (looked in {Path.cwd()})")
    loaded = read_yaml(path)
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise UserError(f"{path} must hold lines of `name: value`, but holds a {type(loaded).__name__}")
    fields = {name: field for section in sections.values() for name, field in fields_of(section).items()}
    for name in loaded:
        if name not in fields:
            faults.add(f"{path}: unknown setting {name}{_hint(str(name), fields)}")
    return {name: _meant(name, value, fields[name], faults) for name, value in loaded.items() if name in fields}


def _meant(name: str, value: Any, field: Any, faults: Faults) -> Any:
    """YAML 1.1 reads a bare `no` as false; a true or false where none belongs is a fault, not 1 or 0."""
    if not isinstance(value, bool) or field.annotation in SWITCHES:
        return value
    if value is False and "no" in str(field.annotation):
        return "no"
    faults.add(f"--{name} {str(value).lower()}: it takes no true or false")
    return None


def _from_command_line(
    parser: argparse.ArgumentParser, arguments: Sequence[str], known: Sequence[str], faults: Faults
) -> dict[str, Any]:
    words = joined(arguments)
    while True:
        try:
            given, others = parser.parse_known_args(words)
            break
        except argparse.ArgumentError as error:  # argparse stops at the first; all are to be told at once
            faults.add(f"{error.argument_name} needs a value")
            words.remove(str(error.argument_name))
    value_follows = False
    for word in others:  # a fault for each unknown name; the word behind it is its value
        if word.startswith("--"):
            name = word[2:].split("=")[0]
            faults.add(f"unknown setting --{name}{_hint(name, known)}; --help_all lists them all")
        elif not value_follows:
            faults.add(f"{word!r} is not a setting: settings are given as --name value")
        value_follows = word.startswith("--") and "=" not in word
    return vars(given)


def _hint(name: str, known: Collection[str]) -> str:
    """The setting that is meant, where it can be told."""
    name = name.replace("-", "_")
    if name in _INSTEAD and name not in known:
        return f": {_INSTEAD[name]}"
    elsewhere = _ELSEWHERE.get(name)
    if elsewhere in known:
        return f" (did you mean {elsewhere}?)"
    recipes = [f"recipes/{task}.py" for task, own in TASKS.items()
               if any(name in fields_of(section) for section in sections_of(own).values())]  # fmt: skip
    return (
        f" here: it is one of {' and '.join(recipes)}" if recipes and name not in known else did_you_mean(name, known)
    )


def _explain(fault: Any) -> str:
    name = str(fault["loc"][0]) if fault["loc"] else "settings"
    message = fault["msg"].removeprefix("Value error, ")
    message = re.sub(r", unable to .*| valid", "", message.replace("integer", "whole number"))
    message = message.replace("an whole", "a whole").replace("Input should be", "must be")
    if name == "warmup_steps" and re.fullmatch(r"0?\.\d+", str(fault["input"])):  # as transformers 5 has it
        message += f"; a share of all steps is --warmup_ratio {fault['input']}"
    return f"--{name} {fault['input']!r}: {message[0].lower()}{message[1:]}"
