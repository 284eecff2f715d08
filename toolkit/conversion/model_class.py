"""The model that a config.json promises: transformers builds it without memory (on the meta
device), and tells its parameters' names, shapes and ties."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from toolkit.conversion.stored import Checkpoint, Stored
from toolkit.errors import Faults, explain_errors, listing
from toolkit.utils.files import read_json_object

CONFIG = "config.json"
_FAULT = "transformers cannot build a model of it"
# peft's name of a task -> transformers' table of classes
_TASKS = {
    "SEQ_CLS": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "TOKEN_CLS": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "QUESTION_ANS": "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
    "FEATURE_EXTRACTION": "MODEL_MAPPING",
}
# of BERT's first checkpoints, such as bert-base-chinese; `from_pretrained` renames them, too
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def model_class(
    path: Path, checkpoint: Checkpoint, adapter: Any = None
) -> ModelClass | None:
    """The class of a config; None if it is not of transformers.

    `adapter`: peft's config of one. The class is the one of its task then, with as many outputs and
    tokens as the checkpoint has. Without a task, where the config's class (that of the base model,
    say) lacks names that the checkpoint has, it is the class of a task that has all of them.

    Raises UserError for a config that transformers cannot build."""
    import transformers

    settings = read_json_object(path)
    kind = None
    with explain_errors(f"{path}: {_FAULT}"):
        known = settings.get("model_type") in transformers.CONFIG_MAPPING
        if known and settings.get("architectures"):
            kind = getattr(transformers, settings["architectures"][0], None)
        if kind is None:
            return None
        config = transformers.CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    task = getattr(adapter, "task_type", None)
    if task in _TASKS:
        kind = _class_of_task(config, _TASKS[task]) or kind
    model = _build(kind, config, path)
    if task not in _TASKS and model.unknown(checkpoint):
        model = _class_with_all(checkpoint, config, path) or model
    return _resized(model, checkpoint) if adapter else model


def _class_with_all(checkpoint: Checkpoint, config: Any, path: Path) -> ModelClass | None:
    """The class of a task that has all names of a checkpoint; None if none has."""
    for table in _TASKS.values():
        kind = _class_of_task(config, table)
        model = kind and _build(kind, config, path)
        if model and not model.unknown(checkpoint):
            return model
    return None


def _class_of_task(config: Any, table: str) -> Any:
    """This architecture's class in a table of transformers; None if it has none."""
    import transformers

    return getattr(transformers, table).get(type(config), None)


def _build(kind: Any, config: Any, path: Path) -> ModelClass:
    with explain_errors(f"{path}: {_FAULT}"), torch.device("meta"):
        return ModelClass(kind(config), path)


def _resized(model: ModelClass, checkpoint: Checkpoint) -> ModelClass:
    """The class with as many outputs and tokens as a checkpoint has rows for."""
    config = model.model.config
    for name, tensor in model.fit(checkpoint).items():
        promised = model.shapes.get(name, tensor.shape)
        if tensor.shape == promised or tensor.shape[1:] != promised[1:]:
            continue
        if promised[0] == config.vocab_size:
            config.vocab_size = tensor.shape[0]
        elif promised[0] == config.num_labels:
            config.num_labels = tensor.shape[0]
    return _build(type(model.model), config, model.path)


class ModelClass:
    """A class of transformers with the sizes of a config."""

    def __init__(self, model: Any, config: Path) -> None:
        self.model = model
        """On the meta device."""
        self.path = config
        self.promise = f"{type(model).__name__} of {config}"
        state = model.state_dict(keep_vars=True)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        """Of all parameters and persistent buffers; tied ones under each of their names."""
        groups: dict[int, list[str]] = defaultdict(list)
        for name, tensor in state.items():
            groups[id(tensor)].append(name)
        others = getattr(model, "all_tied_weights_keys", {})
        self.ties = [sorted(names, key=others.__contains__) for names in groups.values()]
        """All names of each tensor, first the one under which `save_pretrained` writes it."""

    def changes_of(self, config: dict[str, Any]) -> dict[str, Any]:
        """What this class has otherwise than the config.json it was made from."""
        built = self.model.config
        before = type(built).from_dict(config)
        changes: dict[str, Any] = {"architectures": [type(self.model).__name__]}
        if getattr(built, "vocab_size", None) != getattr(before, "vocab_size", None):
            changes["vocab_size"] = built.vocab_size
        if built.num_labels != before.num_labels:
            changes["id2label"], changes["label2id"] = built.id2label, built.label2id
        return changes

    def classifies(self) -> bool:
        return "Classification" in type(self.model).__name__

    def lacks(self, tensors: Collection[str]) -> list[str]:
        """The tensors that are there under none of their names."""
        return [
            names[0] for names in self.ties if not any(name in tensors for name in names)
        ]

    def fit(self, checkpoint: Checkpoint) -> dict[str, Stored]:
        """A checkpoint's tensors by this class's names, as far as it has them, tied ones once.

        A missing or superfluous prefix of the base model (`bert.`) and old names are corrected, as
        by `from_pretrained`. If the class has none of the names, the first part of each is removed:
        `model.` of a LightningModule, say."""
        return self._untied(dict(checkpoint.renamed(self._names(checkpoint)).tensors))

    def unknown(self, checkpoint: Checkpoint) -> list[str]:
        """The names that `fit` does not find in this class."""
        names = self._names(checkpoint).values()
        return [name for name in names if name not in self.shapes]

    def _names(self, checkpoint: Checkpoint) -> dict[str, str]:
        """A checkpoint's names, and this class's, as far as it has them."""
        names = {name: self._known_name(name) for name in checkpoint.tensors}
        if not self.shapes.keys() & names.values():
            names = {
                name: self._known_name(name.partition(".")[2] or name) for name in names
            }
        return names

    def _known_name(self, name: str) -> str:
        """The class's name, which may have the prefix of the base model, or lack it."""
        for old, new in _OLD_NAMES.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        prefix = f"{self.model.base_model_prefix}."
        for candidate in (f"{prefix}{name}", name.removeprefix(prefix)):
            if name not in self.shapes and candidate in self.shapes:
                return candidate
        return name

    def _untied(self, tensors: dict[str, Stored]) -> dict[str, Stored]:
        """Without other names of the same numbers."""
        for first, *others in self.ties:
            for name in set(others) & set(tensors):
                tensor = tensors[name]
                same = tensors.setdefault(first, tensor)
                if same is tensor or torch.equal(same.read(), tensor.read()):
                    del tensors[name]
        return tensors

    def check(self, tensors: Mapping[str, Stored], where: str, remedy: str) -> None:
        """Raises UserError naming all tensors that are missing, unknown or of another shape.
        `remedy`: for those that are missing."""
        faults = Faults()
        lacks = self.lacks(tensors)
        unknown = [name for name in tensors if name not in self.shapes]
        if lacks:
            faults.add(
                f"{where} lacks {listing(lacks, 5)}, which {self.promise} has: {remedy}"
            )
        if unknown:
            remedy = "for a part: --prefix NAME"
            faults.add(f"{where} has {listing(unknown, 5)}, not {self.promise}; {remedy}")
        for name in set(tensors).difference(unknown):
            shape, promised = tensors[name].shape, self.shapes[name]
            if shape != promised:
                shapes = f"{list(shape)}, not {list(promised)} as {self.promise}"
                faults.add(f"{where} has {name} of shape {shapes}")
        faults.raise_if_any()
