"""A YAML file and the command line -> settings.

A recipe's settings are a dataclass whose fields are sections (toolkit.config.sections). The names of all settings share
one flat name space: `--learning_rate 3e-5` and `learning_rate: 3e-5` need no prefix.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import shutil
import sys
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from toolkit.config.sections import LongTaskSettings, TaskSettings
from toolkit.errors import Faults, UserError, did_you_mean, listing
from toolkit.utils import log
from toolkit.utils.features import features
from toolkit.utils.files import read_yaml

Settings = TypeVar("Settings")
Section = TypeVar("Section")

_SWITCHES = (bool, bool | None)
# the settings in `--help`; `--help_all` lists all
_FIRST = {
    "model_name_or_path", "train_file", "validation_file", "test_file", "dataset_name", "text_column", "label_column",
    "max_length", "output_dir", "num_train_epochs", "global_batch_size", "per_device_batch_size",
    "learning_rate", "mixed_precision", "checkpoint_every",
}  # fmt: skip
_LAUNCH = """To choose how it runs: --config_file accelerate_configs/NAME.yaml (with --num_processes, --machines,
--machine_rank, --main_process_ip, --main_process_port, --max_restarts), or --deepspeed_config
under `deepspeed`; timeouts in seconds: --rendezvous_timeout, --ddp_timeout, --peer_timeout,
--stop_timeout; and --failure_detector off."""

_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
# pairs of settings that exclude each other, and why
_EXCLUSIVE = [
    ("train_file", "dataset_name", "name the files or the data set"),
    ("validation_file", "dataset_name", "a data set has its own splits"),
    ("test_file", "dataset_name", "a data set has its own splits"),
    ("warmup_ratio", "warmup_steps", "they set the same thing"),
    ("validation_file", "validation_split", "rows are held out only if there is no validation file"),
]  # fmt: skip
# further pairs, for which the command line does not replace the file's setting
_CONFLICTS = [
    *((name, "teacher", "its second pass has no teacher") for name in ("r_drop_alpha", "fgm_epsilon")),
    *((name, "lora_r", "LoRA trains only its own matrices") for name in ("freeze_layers", "reinit_layers")),
    ("num_hidden_layers", "lora_r", "the adapter would not fit the base model, which has more layers"),
]
# a setting -> the setting that it requires
_REQUIRES = {
    "dataset_config_name": ("dataset_name", ""),
    **dict.fromkeys(("distillation_temperature", "distillation_alpha"),
                    ("teacher", ": pass the teacher's folder")),
    **dict.fromkeys(("lora_alpha", "lora_dropout", "lora_target_modules"),
                    ("lora_r", ", which turns LoRA on: pass it (8 is usual)")),
}  # fmt: skip
# other trainers' name of a setting -> ours
_OTHER_NAMES = {
    "per_device_train_batch_size": "per_device_batch_size", "train_batch_size": "global_batch_size",
    "gradient_accumulation_steps": "global_batch_size", "batch_size": "global_batch_size",
    "eval_steps": "eval_every", "save_steps": "checkpoint_every",
    "save_total_limit": "keep_checkpoints", "resume_from_checkpoint": "resume", "lr": "learning_rate",
    "epochs": "num_train_epochs", "bf16": "mixed_precision", "fp16": "mixed_precision", "optim": "optimizer",
    "max_seq_length": "max_length", "wd": "weight_decay", "patience": "early_stopping_patience",
}  # fmt: skip
# a setting of other trainers -> what to use instead
_REPLACED_BY = {
    "pooling": "a head that reads the mean of all tokens is a change of the recipe: docs/your-own-recipe.md, "
               "Another model class",
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config"),
                    "a strategy is a file: --config_file accelerate_configs/zero2.yaml (ddp, zero1, zero3, fsdp2), or "
                    "deepspeed recipes/cls.py --deepspeed_config ds.json"),
    "train_sampling_strategy": "texts of similar length share a batch unless --group_by_length false; --sampling draws "
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
                    "texts are tokenized before training, and read without copies: there are no workers to set"),
    "dataloader_drop_last": "no sample is dropped: the last batch is smaller",
    **dict.fromkeys(("logging_strategy", "logging_first_step"), "every optimizer step is logged; --logging_steps N "
                    "gathers N steps at once"),
    **dict.fromkeys(("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
                    "--gradient_checkpointing true takes no more"),
    "activation_checkpointing": "--gradient_checkpointing true",
    "auto_find_batch_size": "--per_device_batch_size auto",
    "label_names": "--label_column names the labels' column",
    **dict.fromkeys(("length_column_name", "use_cache", "enable_jit_checkpoint", "optim_target_modules",
                     "lr_scheduler_kwargs"), "there is no such setting, and none is needed"),
    **dict.fromkeys(("local_rank", "use_cpu", "no_cuda"), "the launch decides it: the same file runs with GPUs and "
                    "without"),
    **dict.fromkeys(("hub_strategy", "hub_always_push"), "--push_to_hub uploads model/ once, when the run has ended"),
    "hub_token": "export HF_TOKEN=... (a setting would be written to config.json)",
}  # fmt: skip
_DATA = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt", ".gz")


def tasks() -> dict[str, type[Any]]:
    """Recipe -> settings class: the core's recipes, then those of features."""
    return {"cls": TaskSettings, "bigbird": LongTaskSettings, **{n: c for f in features() for n, c in f.tasks.items()}}


def parse(
    settings_class: type[Settings],
    argv: Sequence[str] | None = None,
    demo: Path | None = None,
    description: str | None = None,
    program: str | None = None,
    launch_help: bool = True,
) -> Settings:
    """`[FILE.yaml] --name value ...` -> settings; the command line overrides the file.

    Where neither names data or a model, the settings file `demo` supplies the rest. Raises UserError with all faults:
    unknown names (with the nearest known one), values of the wrong type or out of range.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    faults = Faults()
    fields = {section: fields_of(section) for section in sections_of(settings_class).values()}
    by_name = {name: field for section in fields.values() for name, field in section.items()}
    parser = _command_line(fields, "--help_all" in arguments, description, program, launch_help)
    if {"-h", "--help", "--help_all"} & set(arguments):
        parser.print_help()
        raise SystemExit(0)
    values: dict[str, Any] = {}
    if arguments and not arguments[0].startswith("-"):
        values = _from_yaml(Path(arguments.pop(0)), by_name, faults)
    values = _override(values, _from_command_line(parser, arguments, by_name, faults))
    if demo:
        values = _apply_demo(values, demo, by_name, faults)
    settings = build(settings_class, values, faults)
    if level := flat(settings).get("log_level"):
        log.logger.setLevel(level.upper())
    return settings


def _apply_demo(values: dict[str, Any], demo: Path, fields: Mapping[str, Any], faults: Faults) -> dict[str, Any]:
    names = [name for name in ("train_file", "dataset_name", "model_name_or_path") if values.get(name) is not None]
    if not names and not any(values.get(name) for name in ("validation_file", "test_file")):
        return _override(_from_yaml(demo, fields, faults), values)
    if names and "model_name_or_path" not in names:
        faults.add("no model is named: pass --model_name_or_path FOLDER_OR_HUB_NAME (bert-base-chinese, ...)")
    elif names == ["model_name_or_path"]:
        faults.add("no data is named: pass --train_file FILE or --dataset_name NAME")
    return values


def _exclusive_pairs() -> list[tuple[str, str, str]]:
    return [*_EXCLUSIVE, *(pair for feature in features() for pair in feature.exclusive)]


def _override(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """The settings of both; those of `upper` replace the same and the excluded settings of `lower`."""
    replaced = {
        loser
        for one, other, _ in [*_exclusive_pairs(), ("num_train_epochs", "max_steps", "")]  # which overrides epochs
        for winner, loser in ((one, other), (other, one))
        if upper.get(winner) is not None and upper.get(loser) is None
    }
    return {**{name: value for name, value in lower.items() if name not in replaced}, **upper}


def build(settings_class: type[Settings], values: Mapping[str, Any], faults: Faults | None = None) -> Settings:
    """{setting: value} -> the validated dataclass. Raises UserError with all faults."""
    faults = Faults() if faults is None else faults
    sections = sections_of(settings_class)
    sections_built: dict[str, Any] = {}
    known = {name: field for section in sections.values() for name, field in fields_of(section).items()}
    values = dict(values)
    for name, value in list(values.items()):
        if name not in known:
            faults.add(f"unknown setting {name}{_hint(name, known)}")
        elif isinstance(value, bool) and known[name].annotation not in _SWITCHES:
            del values[name]  # pydantic would take it for 1 or 0
            if value is False and "'no'" in str(known[name].annotation):
                values[name] = "no"  # which YAML 1.1 reads as false
            else:
                faults.add(f"--{name} {str(value).lower()}: must not be true or false")
        elif value == "":  # --validation_file "$UNSET"
            del values[name]
            faults.add(f"--{name} is empty: give a value, or leave it out")
        if str(value).startswith("~/"):  # of YAML or `--name=~/...`, which a shell leaves as it is
            values[name] = str(Path(value).expanduser())
        if isinstance(value, str) and _UNWRITABLE.search(value):
            faults.add(f"--{name} {value!r}: it contains a character that cannot be written")
    for name, section in sections.items():
        try:
            section_values = {key: values[key] for key in fields_of(section) if key in values}
            sections_built[name] = TypeAdapter(section).validate_python(section_values)
        except ValidationError as error:
            first = {fault["loc"][:1]: fault for fault in reversed(error.errors())}  # a union has one for each type
            faults.extend(map(_fault_message, first.values()))
    faults.extend(_contradictions(values))
    faults.raise_if_any()
    return _add_feature_sections(settings_class)(**sections_built)


def _contradictions(values: Mapping[str, Any]) -> Iterator[str]:
    """A fault for each combination of settings that has no effect or no meaning."""

    def is_set(name: str) -> bool:
        return values.get(name) is not None

    for one, other, why in [*_exclusive_pairs(), *_CONFLICTS]:
        if is_set(one) and is_set(other):
            yield f"--{one} and --{other} contradict each other ({why}): give one of them"
    if values.get("lr_scheduler_type") == "constant" and (values.get("warmup_steps") or values.get("warmup_ratio")):
        yield "--lr_scheduler_type constant has no warm-up: use constant_with_warmup, or leave warmup_steps out"
    smoothing = values.get("label_smoothing_factor")
    if smoothing and values.get("problem_type") in ("regression", "multi_label_classification"):
        yield f"--label_smoothing_factor {smoothing} has no effect with --problem_type {values['problem_type']}"
    if smoothing and values.get("loss") == "focal":
        yield f"--label_smoothing_factor {smoothing} has no effect with --loss focal: leave one of them out"
    if is_set("focal_gamma") and values.get("loss") != "focal":
        yield "--focal_gamma has no effect without --loss focal"
    for name in ("validation_file", "test_file"):
        if is_set(name) and not is_set("train_file") and not is_set("dataset_name"):
            yield f"--{name} is given without --train_file: name the file to train on"
    for name in ("r_drop_alpha", "fgm_epsilon"):
        if is_set(name) and values.get("per_device_batch_size") == "auto":
            yield f"--per_device_batch_size auto measures one pass, and --{name} takes two: pass a number"
    for name, (needed, why) in _REQUIRES.items():
        if is_set(name) and not is_set(needed):
            yield f"--{name} is given without --{needed}{why}"
    for feature in features():
        yield from feature.faults(values)


def _declared_sections(settings_class: type) -> dict[str, type]:
    """Field name -> section class. Raises UserError for a class without `@section`."""
    hints = get_type_hints(settings_class)
    sections = {field.name: hints[field.name] for field in dataclasses.fields(settings_class)}
    for part in sections.values():
        if not hasattr(part, "__pydantic_fields__"):
            raise UserError(f"{part.__name__} holds no settings: write @section (toolkit.config) above its class")
    return sections


def has_section(settings_class: type, section: type) -> bool:
    """Whether a settings class has this section or a subclass of it."""
    return any(issubclass(each, section) for each in _declared_sections(settings_class).values())


def _add_feature_sections(settings_class: type[Settings]) -> type[Settings]:
    """The class with the features' sections as further fields."""
    added = (part for feature in features() for part in feature.sections(settings_class).items())
    declared, base = _declared_sections(settings_class), cast(Hashable, settings_class)
    extended = _extend_class(base, tuple(part for part in added if part[0] not in declared))
    known = {name for section in _declared_sections(extended).values() for name in fields_of(section)}
    for feature in features():
        if feature.switches and known.isdisjoint(feature.switches) and feature.sections(settings_class):
            raise UserError(f"{type(feature).__name__}.switches: there is no setting {' or '.join(feature.switches)}")
    return cast(type[Settings], extended)


@functools.cache  # so that equal settings have the same class
def _extend_class(settings_class: Any, added: tuple[tuple[str, type], ...]) -> Any:
    if not added:
        return settings_class
    fields = [(name, part, dataclasses.field(default_factory=part)) for name, part in added]
    namespace = {"__module__": settings_class.__module__, "__doc__": settings_class.__doc__}
    return dataclasses.make_dataclass(
        settings_class.__name__, fields, bases=(settings_class,), namespace=namespace, frozen=True, kw_only=True
    )


def settings_of_features(settings: Any) -> set[str]:
    """The settings in sections of features; none of them changes how a run trains."""
    added = (feature.sections(type(settings)).values() for feature in features())
    return {name for sections in added for section in sections for name in fields_of(section)}


def sections_of(settings_class: type) -> dict[str, type]:
    """Field name -> section class; those of features last."""
    return _declared_sections(_add_feature_sections(settings_class))


def section_in(settings: Any, section: type[Section]) -> Section:
    """The section of this class in a recipe's settings, or one with default values."""
    return next((value for value in vars(settings).values() if isinstance(value, section)), None) or section()


def flat(settings: Any) -> dict[str, Any]:
    """Settings -> {setting: value}, as in config.json and trackers."""
    return {name: value for part in vars(settings).values() for name, value in dataclasses.asdict(part).items()}


def fields_of(section: type) -> dict[str, Any]:
    """Name -> pydantic's field, whose description is the docstring below it."""
    fields: dict[str, Any] = {}
    for part in reversed(section.__mro__):  # only the declaring class has a field's docstring
        declared = getattr(part, "__pydantic_fields__", {})
        fields |= {name: field for name, field in declared.items() if field.description or name not in fields}
    return fields


def _from_yaml(path: Path, fields: Mapping[str, Any], faults: Faults) -> dict[str, Any]:
    if path.suffix not in (".yaml", ".yml"):
        way = f"pass --train_file {path}" if path.suffix in _DATA else "settings are given as --name value"
        if path.suffix == ".json":  # after DeepSpeed's switch `--deepspeed`, say
            way += f" for rows, --deepspeed_config {path} for DeepSpeed's settings"
        raise UserError(f"{path} is not a YAML file of settings: {way}")
    if not path.is_file():
        others = [str(file) for file in path.parent.glob("*.yaml")]
        raise UserError(f"there is no settings file {path}{did_you_mean(str(path), others)} (looked in {Path.cwd()})")
    loaded = read_yaml(path)
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise UserError(f"{path} must hold lines of `name: value`, but holds a {type(loaded).__name__}")
    for name in (name for name in loaded if name not in fields):
        nested = isinstance(loaded[name], dict) and not fields.keys().isdisjoint(loaded[name])
        hint = ": there are no sections, write its settings at the margin" if nested else _hint(str(name), fields)
        faults.add(f"{path}: unknown setting {name}{hint}")
    return {name: value for name, value in loaded.items() if name in fields}


def _from_command_line(
    parser: argparse.ArgumentParser, arguments: Sequence[str], known: Collection[str], faults: Faults
) -> dict[str, Any]:
    words = _join_negative_numbers(arguments)
    while True:
        try:
            options, others = parser.parse_known_args(words)
            break
        except argparse.ArgumentError as error:  # argparse stops at the first; all are reported
            faults.add(f"{error.argument_name} needs a value")
            words.remove(str(error.argument_name))
    value_follows, strays = False, list[str]()
    for word in others:  # a fault for each unknown name; the word after it is its value
        if word.startswith("--"):
            name = word[2:].split("=")[0]
            faults.add(f"unknown setting --{name}{_hint(name, known)}; --help_all lists them all")
        elif not value_follows:
            strays.append(repr(word))
        value_follows = word.startswith("--") and "=" not in word
    if strays:
        way = "settings are given as --name value, a pattern of files in quotes: 'part-*.csv'"
        faults.add(f"{listing(strays, 3)} is not a setting: {way}")
    return vars(options)


def _command_line(
    fields: Mapping[type, Mapping[str, Any]], help_all: bool, description: str | None, program: str | None, launch: bool
) -> argparse.ArgumentParser:
    """A parser of `--name value` that returns strings; a boolean may omit its value, as in transformers. `fields`:
    section -> {setting: pydantic's field}. Its help lists the most used settings, or all (`help_all`)."""
    more = "" if help_all else f"--help_all lists all {sum(map(len, fields.values()))} settings.\n\n"
    width = min(shutil.get_terminal_size().columns, 120)
    parser = argparse.ArgumentParser(
        prog=program, usage="%(prog)s [SETTINGS.yaml] [--name value ...]", description=description,
        epilog=more + (_LAUNCH if launch else ""),
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=width),
        argument_default=argparse.SUPPRESS, allow_abbrev=False, add_help=False, exit_on_error=False,
    )  # fmt: skip
    first = {*_FIRST, *(name for feature in features() for name in feature.first_settings)}
    for section, section_fields in fields.items():
        group = parser.add_argument_group((section.__doc__ or "").strip().rstrip("."))
        for name, field in section_fields.items():
            listed = help_all or name in first or not section.__module__.startswith("toolkit.")
            switch: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation in _SWITCHES else {}
            default = "" if field.default is None else f" [{str(field.default).lower()}]"
            text = f"{field.description or ''}{default}".replace("%", "%%") if listed else argparse.SUPPRESS
            group.add_argument(f"--{name}", metavar=metavar(field.annotation), help=text, **switch)
    return parser


def _join_negative_numbers(arguments: Sequence[str]) -> list[str]:
    """`--x -1e-5` -> `--x=-1e-5`: argparse reads a negative number with an exponent as an option."""
    words: list[str] = []
    for word in arguments:
        if re.match(r"-\.?\d", word) and words and re.fullmatch(r"--\w+", words[-1]):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def metavar(annotation: Any) -> str:
    """The metavar: `a|b` for choices, else the kind of value."""
    if hasattr(annotation, "__metadata__"):
        return metavar(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    if kinds := [metavar(part) for part in get_args(annotation) if part is not type(None)]:
        choices_first = "|".join(sorted(kinds, key=str.isupper))
        return choices_first.replace("TEXT", "PATH") if len(kinds) > 1 else choices_first
    return {bool: "true|false", int: "NUMBER", float: "NUMBER"}.get(annotation, "TEXT")


def _hint(name: str, known: Collection[str]) -> str:
    """What to use instead of an unknown setting."""
    name = name.replace("-", "_")
    if name in known:
        return did_you_mean(name, known)
    if name in _REPLACED_BY:
        return f": {_REPLACED_BY[name]}"
    if (other_name := _OTHER_NAMES.get(name)) in known:
        return f" (did you mean {other_name}?)"
    recipes = [f"recipes/{task}.py" for task, settings_class in tasks().items()
               if any(name in fields_of(section) for section in sections_of(settings_class).values())]  # fmt: skip
    return f" here: it is one of {' and '.join(recipes)}" if recipes else did_you_mean(name, known)


def _fault_message(fault: Any) -> str:
    name = str(fault["loc"][0]) if fault["loc"] else "settings"
    message = fault["msg"].removeprefix("Value error, ")
    message = re.sub(r", unable to .*| valid", "", message.replace("integer", "whole number"))
    message = message.replace("an whole", "a whole").replace("Input should be", "must be")
    if isinstance(value := fault["input"], list | dict) and message.endswith("a string"):
        parts = value if isinstance(value, list) else [f"{key}={part}" for key, part in value.items()]
        message += " ('part-*.csv' for several files)" if name.endswith("_file") else f": {','.join(map(str, parts))}"
    if message.endswith("number") and re.fullmatch(r"[\d.e+-]+(,[\d.e+-]+)+", str(fault["input"])):
        message += f"; to compare several: toolkit sweep RECIPE.py --search {name}={fault['input']}"
    if name == "warmup_steps" and re.fullmatch(r"0?\.\d+", str(fault["input"])):  # as in transformers 5
        message += f"; a share of all steps is --warmup_ratio {fault['input']}"
    return f"--{name} {fault['input']!r}: {message[0].lower()}{message[1:]}"


def begins_with_name(arguments: list[str]) -> bool:
    """Whether the first word is the name of a recipe or a model, not a setting or a settings file."""
    return bool(arguments) and not re.search(r"^-|\.ya?ml$", arguments[0])
