"""The model that a config.json promises: transformers builds it without memory (on the meta
device), and tells its parameters' names, shapes and ties."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from toolkit.conversion.stored import Checkpoint, Stored
from toolkit.errors import Faults, UserError, first_line, listing
from toolkit.utils.files import read_table

CONFIG = "config.json"
# of BERT's first checkpoints, such as bert-base-chinese; `from_pretrained` renames them, too
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def model_class(path: Path) -> ModelClass | None:
    """None if the config's class is not of transformers. Raises UserError for a config that it
    cannot build."""
    import transformers

    config = read_table(path, {})
    kind = getattr(transformers, (config.get("architectures") or [""])[0], None)
    if kind is None or config.get("model_type") not in transformers.CONFIG_MAPPING:
        return None
    try:
        settings = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
        with torch.device("meta"):
            return ModelClass(kind(settings), path)
    except Exception as error:
        fault = f"{kind.__name__} cannot be built from it: {first_line(error)}"
        raise UserError(f"{path}: {fault}") from error


class ModelClass:
    """A class of transformers with the sizes of a config."""

    def __init__(self, model: Any, config: Path) -> None:
        self.model = model
        """On the meta device."""
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

    def lacks(self, tensors: Collection[str]) -> list[str]:
        """The tensors that are there under none of their names."""
        return [names[0] for names in self.ties if not any(name in tensors for name in names)]

    def fit(self, checkpoint: Checkpoint) -> dict[str, Stored]:
        """A checkpoint's tensors by this class's names, as far as it has them, tied ones once.

        A missing or superfluous prefix of the base model (`bert.`) and old names are corrected, as
        by `from_pretrained`. If the class has none of the names, the first part of each is removed:
        `model.` of a LightningModule, say."""
        names = {name: self._known_name(name) for name in checkpoint.tensors}
        if not self.shapes.keys() & names.values():
            names = {name: self._known_name(name.partition(".")[2] or name) for name in names}
        return self._untied(dict(checkpoint.renamed(names).tensors))

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

    def check(self, tensors: Mapping[str, Stored], where: str) -> None:
        """Raises UserError naming all tensors that are missing, unknown or of another shape."""
        faults = Faults()
        lacks = self.lacks(tensors)
        unknown = [name for name in tensors if name not in self.shapes]
        if lacks:
            remedy = "if they were frozen, pass the base model as --base_model"
            faults.add(f"{where} lacks {listing(lacks, 5)}, which {self.promise} has: {remedy}")
        if unknown:
            remedy = "for a part: --prefix NAME"
            faults.add(f"{where} has {listing(unknown, 5)}, not {self.promise}; {remedy}")
        for name in set(tensors).difference(unknown):
            shape, promised = tensors[name].shape, self.shapes[name]
            if shape != promised:
                shapes = f"{list(shape)}, not {list(promised)} as {self.promise}"
                faults.add(f"{where} has {name} of shape {shapes}")
        faults.raise_if_any()
