"""Settings -> tables -> a cached folder of tokens and targets -> the data of a run.

The name of the folder is a digest of all that its content depends on (`_cache_key`): a second run,
or one with another learning rate, reads and tokenizes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from toolkit import launch
from toolkit.config import PretrainedSettings, flat, section_in
from toolkit.data.balance import weigh_classes
from toolkit.data.labels import Labels
from toolkit.data.select import data_seed, select_samples
from toolkit.data.table import Table
from toolkit.data.targets import Targets, targets_of
from toolkit.data.token_files import load_split
from toolkit.data.tokenizer import (
    choose_max_length,
    fingerprint,
    has_token_types,
    head_tokens_of,
    separator_of,
    set_truncation,
)
from toolkit.data.tokenizer_check import tokenizer_notes
from toolkit.data.tokens import Split
from toolkit.pretrained import refuse_foreign_tokenizer, refuse_missing_ends
from toolkit.utils.cache import cached_folder, digest_of_text
from toolkit.utils.features import features

if TYPE_CHECKING:
    from accelerate import Accelerator

_LAYOUT = 8  # increase when the content of a prepared folder changes
_SETTINGS = ("text_column", "text_pair", "drop_empty_text", "validation_split",
             "max_train_samples", "max_eval_samples")  # fmt: skip
"""The settings that prepared data depend on, besides those of their targets."""
_SOURCES = (
    "train_file",
    "validation_file",
    "test_file",
    "dataset_name",
    "model_name_or_path",
)
"""Settings that may differ between machines: their content is compared."""


@dataclass(frozen=True)
class Data:
    """The data of a run; the splits' arrays are memory-mapped from `folder`."""

    folder: Path
    digest: str
    text_column: str
    """Several are separated by commas."""
    text_pair: str | None
    """The column of second texts."""
    max_length: int
    notes: tuple[str, ...]
    """Lines for the user: truncated texts, overlaps, imbalanced classes."""
    targets: Targets
    train: Split
    validation: Split
    test: Split | None
    file_digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of the content of each split's file."""
    pos_weight: torch.Tensor | None = None
    """(classes,) float32, on the device: the weight of positive labels in the loss
    (--pos_weight)."""

    @property
    def labels(self) -> Labels:
        """The targets, if these are labels."""
        return cast(Labels, self.targets)

    @property
    def splits(self) -> dict[str, Split]:
        splits = (self.train, self.validation, self.test)
        return {split.name: split for split in splits if split is not None}

    def with_collator(self, collator: Any) -> Data:
        """The same with this collator (as in `Split.collator`) for every split."""
        splits: Any = {}
        for name, split in self.splits.items():
            splits[name] = replace(split, collator=collator)
        return replace(self, **splits)

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(split) for name, split in self.splits.items()}

    @property
    def facts(self) -> dict[str, Any]:
        """The task, which must be equal in a checkpoint and the run that resumes from it. JSON."""
        facts = self.targets.facts()
        if self.text_pair:
            facts["text_pair"] = self.text_pair
        return facts


def prepare_data(
    settings: Any, tokenizer: Any, model_config: Any, accelerator: Accelerator | None = None
) -> Data:
    """Tokenizes the texts and encodes their targets, in one process per machine; all processes load
    them. Raises UserError for every fault of the input, and when machines have different data."""
    if accelerator is not None:
        values = flat(settings)
        for name in _SOURCES:
            values.pop(name, None)
        launch.require_equal("the settings", values)
    targets_class = targets_of(settings)
    targets_class.check(settings, tokenizer)
    set_truncation(tokenizer, settings.data)
    refuse_foreign_tokenizer(tokenizer, model_config)
    refuse_missing_ends(tokenizer, model_config)
    tables = targets_class.tables(settings)
    key = _cache_key(settings, tokenizer, model_config, tables)
    if accelerator is not None:  # before an hour of work on different data
        launch.require_equal("the data", key)
    digest = digest_of_text(json.dumps(key, sort_keys=True))
    source = ", ".join(table.name for table in tables.values())
    with cached_folder("tokens", digest, accelerator, source) as (folder, draft):
        if draft:
            _write(draft, settings, tokenizer, tables, key["max_length"])
    data = _load(settings, folder, model_config, tables)
    if accelerator is None or accelerator.is_main_process:
        notes = tokenizer_notes(section_in(settings, PretrainedSettings), tokenizer)
        data = replace(data, notes=(*notes, *data.notes))
    # a user's recipe may lack this section
    objective = getattr(settings, "objective", None)
    if objective is not None and isinstance(data.targets, Labels):
        device = torch.device("cpu") if accelerator is None else accelerator.device
        data = weigh_classes(data, objective, device)
    return data


def _cache_key(
    settings: Any, tokenizer: Any, model_config: Any, tables: Mapping[str, Table]
) -> dict[str, Any]:
    """What the prepared data depend on; the seed only if rows are drawn. JSON."""
    data = settings.data
    key = {name: getattr(data, name, None) for name in _SETTINGS}
    key |= targets_of(settings).data_facts(settings)
    is_pair = key["text_pair"] is not None
    key["layout"] = _LAYOUT
    key["max_length"] = choose_max_length(data.max_length, tokenizer, model_config, is_pair)
    key["token types"] = "token_type_ids" in tokenizer.model_input_names
    key["separator"] = separator_of(tokenizer)
    key["truncation_side"] = tokenizer.truncation_side
    key["head_tokens"] = head_tokens_of(tokenizer)
    if "validation" not in tables or data.max_train_samples or data.max_eval_samples:
        key["seed"] = data_seed(settings)
    for split, table in tables.items():
        key[f"the content of the {split} data"] = table.digest
    key["the tokenizer"] = fingerprint(tokenizer)
    return key


def _write(
    folder: Path,
    settings: Any,
    tokenizer: Any,
    tables: Mapping[str, Table],
    max_length: int,
) -> None:
    """Writes the tokens and targets of every split, and `meta.json`."""
    splits, targets, notes = select_samples(settings, tokenizer, tables)
    for split, samples in splits.items():
        (folder / split).mkdir()
        table, encoded = samples.table, samples.targets
        notes += targets.write(folder / split, table, encoded, tokenizer, max_length)
    meta = {
        "targets": asdict(targets),
        "text_column": splits["train"].table.text_columns[0],
        "max_length": max_length,
        "notes": notes,
        "splits": list(splits),
    }
    (folder / "meta.json").write_text(
        json.dumps(meta, ensure_ascii=False), encoding="utf-8"
    )


def _load(
    settings: Any, folder: Path, model_config: Any, tables: Mapping[str, Table]
) -> Data:
    """The data of a prepared folder, for a model of this config."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    targets_class = targets_of(settings)
    splits: dict[str, Any] = dict.fromkeys(("train", "validation", "test"))
    for name in meta["splits"]:
        splits[name] = load_split(folder, name, model_config, targets_class.split_class)
    notes = meta["notes"]
    text_pair = getattr(settings.data, "text_pair", None)
    if text_pair and not has_token_types(model_config):
        notes.append(
            "this model has one token type: only a separator divides the texts of a pair"
        )
    return Data(
        folder=folder,
        digest=folder.name,
        text_column=meta["text_column"],
        text_pair=text_pair,
        max_length=meta["max_length"],
        notes=tuple(notes),
        targets=targets_class.from_json(meta["targets"]),
        file_digests={split: table.digest for split, table in tables.items()},
        **splits,
    )


def finish_data(
    settings: Any, data: Data, tokenizer: Any, accelerator: Accelerator
) -> Data:
    """The data with the collator of their targets, and what features change (`Feature.data`)."""
    data = data.with_collator(type(data.targets).collator(settings))
    for feature in features():
        data = feature.data(settings, data, tokenizer, accelerator)
    return data
