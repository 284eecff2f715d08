"""A YAML file and the command line -> settings.

A recipe's settings are a dataclass whose fields are sections (toolkit.config.sections); features
add theirs. The names of all settings share one flat name space: `--learning_rate 3e-5` and
`learning_rate: 3e-5` need no prefix.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from toolkit.config.sections import LongTaskSettings, TaskSettings, Values, conflict
from toolkit.errors import Faults, UserError, did_you_mean, listing
from toolkit.utils import log
from toolkit.utils.features import features
from toolkit.utils.files import read_yaml

Settings = TypeVar("Settings")
Section = TypeVar("Section")
Fields = Mapping[str, Any]
"""Setting -> pydantic's field."""

_SWITCHES = (bool, bool | None)
_LAUNCH = (
    "To choose how it runs: --config_file accelerate_configs/NAME.yaml (docs/launching.md)."
)
# other trainers' name of a setting -> ours; those without a twin are in docs/migrating.md
_OTHER_NAMES = {
    "per_device_train_batch_size": "per_device_batch_size",
    "gradient_accumulation_steps": "global_batch_size",
    "batch_size": "global_batch_size",
    "eval_steps": "eval_every",
    "save_steps": "checkpoint_every",
    "save_total_limit": "keep_checkpoints",
    "resume_from_checkpoint": "resume",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "bf16": "mixed_precision",
    "fp16": "mixed_precision",
    "optim": "optimizer",
    "max_seq_length": "max_length",
}


# --- the settings of a recipe


def tasks() -> dict[str, type[Any]]:
    """Recipe -> settings class: the core's recipes, then those of features."""
    classes: dict[str, type[Any]] = {"cls": TaskSettings, "bigbird": LongTaskSettings}
    for feature in features():
        classes |= feature.recipes
    return classes


def sections_of(settings_class: type) -> dict[str, type]:
    """Field name -> section class; those of features last. Raises UserError for a class without
    `@section`."""
    sections = _declared_sections(settings_class) | _feature_sections(settings_class)
    for part in sections.values():
        if not hasattr(part, "__pydantic_fields__"):
            raise UserError(
                f"{part.__name__}: write @section (toolkit.config) above its class"
            )
    return sections


def fields_of(section: type) -> dict[str, Any]:
    """Name -> pydantic's field, whose description is the docstring below it."""
    fields: dict[str, Any] = {}
    # only the declaring class has a field's docstring
    for part in reversed(section.__mro__):
        for name, field in getattr(part, "__pydantic_fields__", {}).items():
            if field.description or name not in fields:
                fields[name] = field
    return fields


def section_in(settings: Any, section: type[Section]) -> Section:
    """The section of this class in a recipe's settings, or one with default values."""
    for value in vars(settings).values():
        if isinstance(value, section):
            return value
    return section()


def settings_after_training(settings: Any) -> set[str]:
    """The settings of features that do not change how a run trains."""
    names: set[str] = set()
    for feature in features():
        if not feature.affects_training:
            for section in feature.settings(type(settings)).values():
                names |= fields_of(section).keys()
    return names


def flat(settings: Any) -> dict[str, Any]:
    """Settings -> {setting: value}, as in config.json and trackers."""
    values: dict[str, Any] = {}
    for section in vars(settings).values():
        values |= dataclasses.asdict(section)
    return values


def _all_fields(settings_class: type) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for section in sections_of(settings_class).values():
        fields |= fields_of(section)
    return fields


def _declared_sections(settings_class: type) -> dict[str, type]:
    """Field name -> section class."""
    hints = get_type_hints(settings_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(settings_class)}


def _feature_sections(settings_class: type) -> dict[str, type]:
    """The sections of features: field name -> section class."""
    added: dict[str, type] = {}
    for feature in features():
        added |= feature.settings(settings_class)
    return added


@functools.cache  # so that equal settings have the same class
def _extend_class(settings_class: Any, added: tuple[tuple[str, type], ...]) -> Any:
    """The class with the sections of features as further fields."""
    return dataclasses.make_dataclass(
        settings_class.__name__,
        added,
        bases=(settings_class,),
        namespace={"__module__": settings_class.__module__},
        frozen=True,
        kw_only=True,
    )


# --- from words and files


def parse(
    settings_class: type[Settings],
    argv: Sequence[str] | None = None,
    demo: Path | None = None,
    description: str | None = None,
    program: str | None = None,
) -> Settings:
    """`[FILE.yaml] --name value ...` -> settings; the command line overrides the file.

    Where neither names data or a model, the settings file `demo` supplies the rest. Raises
    UserError with all faults: unknown names (with the nearest known one), values of the wrong type
    or out of range, contradictions."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        _help_page(settings_class, description, program).print_help()
        raise SystemExit(0)
    faults = Faults()
    fields = _all_fields(settings_class)
    values: dict[str, Any] = {}
    if words and not words[0].startswith("-"):
        values = _from_yaml(Path(words.pop(0)), fields, faults)
    values = _override(settings_class, values, _from_command_line(words, fields, faults))
    if demo:
        missing = list(_missing_half(values))
        if len(missing) == 2:
            values = _override(settings_class, _from_yaml(demo, fields, faults), values)
        else:
            faults.extend(missing)
    settings = build(settings_class, values, faults)
    level = flat(settings).get("log_level")
    if level:
        log.logger.setLevel(level.upper())
    return settings


def build(
    settings_class: type[Settings], values: Values, faults: Faults | None = None
) -> Settings:
    """{setting: value} -> the validated dataclass. Raises UserError with all faults."""
    faults = Faults() if faults is None else faults
    fields = _all_fields(settings_class)
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name in fields:
            checked |= _checked(name, value, fields[name], faults)
        else:
            faults.add(f"unknown setting {name}{_hint(name, fields)}")
    sections: dict[str, Any] = {}
    for name, section in sections_of(settings_class).items():
        of_section = {key: checked[key] for key in fields_of(section) if key in checked}
        try:
            sections[name] = TypeAdapter(section).validate_python(of_section)
        except ValidationError as error:
            faults.extend(_value_faults(error))
    faults.extend(_contradictions(settings_class, checked))
    faults.raise_if_any()
    added = tuple(_feature_sections(settings_class).items())
    extended: Any = _extend_class(cast(Any, settings_class), added)
    return cast(Settings, extended(**sections))


def _checked(name: str, value: Any, field: Any, faults: Faults) -> dict[str, Any]:
    """{name: value}, or nothing for what pydantic would take silently for something else."""
    if value is False and "'no'" in str(field.annotation):
        return {name: "no"}  # which YAML 1.1 reads as false
    if isinstance(value, bool) and field.annotation not in _SWITCHES:
        faults.add(f"--{name} {str(value).lower()}: must not be true or false")
        return {}
    if value == "":  # --validation_file "$UNSET"
        faults.add(f"--{name} is empty: give a value, or leave it out")
        return {}
    if isinstance(value, str) and value.startswith("~/"):  # in YAML, or --name=~/...
        return {name: str(Path(value).expanduser())}
    return {name: value}


def _value_faults(error: ValidationError) -> Iterator[str]:
    """A line for each setting: of a union pydantic reports every member."""
    reported = set()
    for fault in error.errors():
        name = str(fault["loc"][0])
        if name not in reported:
            reported.add(name)
            yield f"--{name} {fault['input']!r}: {fault['msg']}"


def _missing_half(values: Values) -> Iterator[str]:
    """A fault for data without a model, or a model without data."""
    if values.get("model_name_or_path") is None:
        yield "no model is named: pass --model_name_or_path FOLDER_OR_HUB_NAME"
    if values.get("train_file") is None and values.get("dataset_name") is None:
        yield "no data is named: pass --train_file FILE or --dataset_name NAME"


# --- settings that exclude or need each other


def _alternatives(settings_class: type) -> list[tuple[str, str, str]]:
    pairs: list[tuple[str, str, str]] = []
    for section in sections_of(settings_class).values():
        pairs += getattr(section, "alternatives", ())
    return pairs


def _override(settings_class: type, lower: Values, upper: Values) -> dict[str, Any]:
    """The settings of both; those of `upper` replace the same and the excluded ones of `lower`."""
    pairs = [(one, other) for one, other, _ in _alternatives(settings_class)]
    pairs.append(("num_train_epochs", "max_steps"))  # the second overrides the first
    values = dict(lower)
    for pair in pairs:
        in_upper = [name for name in pair if upper.get(name) is not None]
        if len(in_upper) == 1:
            for name in pair:
                values.pop(name, None)
    return {**values, **upper}


def _contradictions(settings_class: type, values: Values) -> Iterator[str]:
    """A fault for each combination of settings that has no effect or no meaning."""
    for section in sections_of(settings_class).values():
        if hasattr(section, "contradictions"):
            yield from section.contradictions(values)
    for pair in _alternatives(settings_class):
        yield from conflict(values, *pair)


# --- the YAML file, the command line, its help


def _from_yaml(path: Path, fields: Fields, faults: Faults) -> dict[str, Any]:
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"{path} is not a YAML file of settings: for data, --train_file {path}; settings are "
            "given as --name value"
        )
    if not path.is_file():
        raise UserError(
            f"there is no settings file {path} (looked in {Path.cwd()}): name another, or pass "
            "--train_file and --model_name_or_path"
        )
    loaded = read_yaml(path) or {}  # an empty file
    if not isinstance(loaded, dict):
        raise UserError(f"{path} must hold lines of `name: value`")
    values = {}
    for name, value in loaded.items():
        if name in fields:
            values[name] = value
        else:
            faults.add(f"{path}: unknown setting {name}{_hint(str(name), fields)}")
    return values


def _from_command_line(
    words: Sequence[str], fields: Fields, faults: Faults
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    strays = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            strays.append(repr(word))
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        elif not equals and name in fields and fields[name].annotation in _SWITCHES:
            value = "true"
        elif not equals and name in fields:
            faults.add(f"--{name} needs a value")
            continue
        if name in fields:
            values[name] = value
        else:
            faults.add(
                f"unknown setting --{name}{_hint(name, fields)}; --help lists them all"
            )
    if strays:
        faults.add(
            f"{listing(strays, 3)} is not a setting: settings are given as --name value, a pattern "
            "of files in quotes: 'part-*.csv'"
        )
    return values


def _hint(name: str, known: Collection[str]) -> str:
    """What to use instead of an unknown setting."""
    name = name.replace("-", "_")
    twin = _OTHER_NAMES.get(name)
    if twin in known:
        return f" (did you mean {twin}?)"
    return did_you_mean(name, known)


def _help_page(
    settings_class: type, description: str | None, program: str | None
) -> argparse.ArgumentParser:
    """All settings, by section; argparse only prints them."""
    page = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s [SETTINGS.yaml] [--name value ...]",
        description=description,
        epilog=_LAUNCH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    for section in sections_of(settings_class).values():
        group = page.add_argument_group((section.__doc__ or "").strip().rstrip("."))
        for name, field in fields_of(section).items():
            text = field.description or ""
            if field.default is not None:
                text = f"{text} [{str(field.default).lower()}]"
            kind = metavar(field.annotation)
            group.add_argument(f"--{name}", metavar=kind, help=text.replace("%", "%%"))
    return page


def metavar(annotation: Any) -> str:
    """The metavar: `a|b` for choices, else the kind of value."""
    if hasattr(annotation, "__metadata__"):
        return metavar(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    kinds = [metavar(part) for part in get_args(annotation) if part is not type(None)]
    if kinds:
        return "|".join(kinds)
    return {bool: "true|false", int: "NUMBER", float: "NUMBER"}.get(annotation, "TEXT")
