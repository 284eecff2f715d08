"""LoRA's parameters by name: in a live peft model, and in files. Imports neither peft nor torch.

A live model has, under `base_model.model.`,

    X.base_layer.weight, X.base_layer.bias                    frozen, of a layer with LoRA
    X.lora_A.NAME.weight (r, in), X.lora_B.NAME.weight (out, r)          trained
    X.lora_embedding_A.NAME (r, in), X.lora_embedding_B.NAME (out, r)    trained, of an embedding
    H.original_module.*, H.modules_to_save.NAME.*             the head before training, and the trained one
    all other parameters                                      frozen, under the base model's names

NAME is the adapter's name, by default `default`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.tensor_index import CheckpointReader, TensorIndex
from toolkit.errors import UserError, listing
from toolkit.utils.files import read_table

ADAPTER_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<layer>.*)\.lora_(?P<kind>embedding_)?(?P<factor>[AB])\.(?P<name>[^.]+)(?P<end>\.weight)?$")
_TRAINED_HEAD = re.compile(r"\.modules_to_save\.[^.]+\.")
# Keys of adapter_config.json for variants whose merged weight is not W + scaling * B A.
_UNSUPPORTED = (
    "use_dora", "lora_bias", "use_qalora", "use_bdlora", "layer_replication", "target_parameters",
    "trainable_token_indices", "alora_invocation_tokens", "megatron_config", "arrow_config", "kasa_config",
    "velora_config", "monteclora_config",
)  # fmt: skip
HEADS = ("classifier.weight", "classifier.out_proj.weight", "score.weight")
"""Head weights of classifiers; their rows are the labels."""
_SEQUENCE_HEADS = {
    "classifier.weight": ("pooler.dense.weight", "pre_classifier.weight"),
    "classifier.out_proj.weight": ("",),
}
# Values of init_lora_weights that change the base weights too.
_BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")


def in_adapter(name: str) -> bool:
    """Whether a live model's parameter is the adapter's, not the base model's."""
    return ".lora_" in name or _TRAINED_HEAD.search(name) is not None


def in_merged_model(name: str) -> bool:
    """Whether the merged model has a live model's parameter."""
    return ".lora_" not in name and ".original_module." not in name


def merged_name(name: str) -> str:
    """The merged model's name of a live model's parameter."""
    return _TRAINED_HEAD.sub(".", name.removeprefix(_PREFIX).replace(".base_layer.", "."))


def saved_name(name: str) -> str:
    """peft's name of a live model's parameter in `adapter_model.safetensors`."""
    if match := _FACTOR.match(name):
        return f"{match['layer']}.lora_{match['kind'] or ''}{match['factor']}{match['end'] or ''}"
    return _TRAINED_HEAD.sub(".", name)


def live_name(name: str) -> str:
    """The live model's name of a tensor in `adapter_model.safetensors`."""
    return re.sub(r"(\.lora_(?:embedding_)?[AB])(\.weight)?$", r"\1.default\2", name)


@dataclass(frozen=True, eq=False)
class LoraDelta:
    """What a LoRA adapter adds to a weight: scaling * B A (Hu et al., 2021, section 4.1)."""

    a: TensorIndex  # (rank, in)
    b: TensorIndex  # (out, rank)
    scaling: float
    transposed: bool
    """For weights of shape (in, out): embeddings, and layers with `fan_in_fan_out`."""

    @property
    def shape(self) -> tuple[int, int]:
        shape = self.b.shape[0], self.a.shape[1]
        return shape[::-1] if self.transposed else shape


@dataclass(frozen=True)
class AdapterConfig:
    """An adapter_config.json."""

    path: Path
    content: Mapping[str, Any]

    def _layer_value(self, layer: str, patterns: str, key: str) -> int | float:
        """A layer's rank or alpha. Raises UserError for an invalid number."""
        table = self.content.get(patterns) or {}
        # peft takes any regular expression, which can take hours to match
        if not isinstance(table, dict) or not all(re.fullmatch(r"[\w.-]+", name) for name in table):
            raise UserError(f"{self.path}: {patterns} should be a table by layers' names, without patterns")
        names = [name for name in table if f".{layer}".endswith(f".{name}")]
        value = table[names[0]] if names else self.content.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (value and math.isfinite(value)):
            where = f"{patterns} of {names[0]}" if names else key
            raise UserError(f"{self.path}: {where} is {value!r:.60} and should be a finite number that is not zero")
        return value

    def delta(self, name: str, weight: TensorIndex, a: TensorIndex, b: TensorIndex, is_embedding: bool) -> LoraDelta:
        """What the factors add to a weight. Raises UserError if factors, weight and config do not fit."""
        layer, rank = name.removesuffix(".weight"), a.shape[0]
        expected = self._layer_value(layer, "rank_pattern", "r")
        if expected != rank:
            fault = f"{self.path} has rank {expected} for {layer} and the checkpoint {rank}"
            raise UserError(f"{fault}: the config belongs to another adapter")
        alpha = self._layer_value(layer, "alpha_pattern", "lora_alpha")
        scaling = float(alpha / (math.sqrt(rank) if self.content.get("use_rslora") else rank))
        delta = LoraDelta(a, b, scaling, is_embedding or bool(self.content.get("fan_in_fan_out")))
        if delta.shape != weight.shape or rank != b.shape[1]:
            raise UserError(f"the adapter of {layer} has shape {list(delta.shape)}, its weight {list(weight.shape)}")
        return delta

    def head(self, names: Collection[str]) -> str | None:
        """The name of a classifier's head, among `names`; None for other adapters."""
        if self.content.get("task_type") != "SEQ_CLS":
            return None
        return next((head for head in HEADS if head in names), None)

    def check_mergeable(self, base_excluded: bool) -> None:
        """Raises UserError for variants of LoRA whose merged weight is not W + scaling * B @ A."""
        if used := [key for key in _UNSUPPORTED if self.content.get(key)]:
            raise UserError(f"{self.path} uses {listing(used)}: only peft merges such adapters (merge_and_unload)")
        initial = str(self.content.get("init_lora_weights")).lower()
        if base_excluded and initial.startswith(_BASE_CHANGING):
            raise UserError(f"{self.path}: {initial} changes the base weights, which are not in the checkpoint")


def classifier_head(names: Collection[str]) -> str | None:
    """The head of an encoder that classifies texts, among all `names` of a model; of one for tokens None."""
    for head, others in _SEQUENCE_HEADS.items():
        if head in names and any(name.endswith(others) for name in names):
            return head
    return None


def read_adapter_config(folder: Path | None, reader: CheckpointReader) -> AdapterConfig:
    """Raises UserError when the folder has no adapter_config.json, or one that is not LoRA's."""
    if folder is None or not (path := folder / ADAPTER_CONFIG).is_file():
        fault = f"{reader.path} has a LoRA adapter and no {ADAPTER_CONFIG}"
        raise UserError(f"{fault}: pass the folder that has it as --config_from FOLDER")
    content = read_table(path, {})
    if content.get("peft_type") != "LORA":
        raise UserError(f"{path} is not of LoRA (peft_type {content.get('peft_type')}): only LoRA can be converted")
    return AdapterConfig(path, content)


def find_factors(tensors: Mapping[str, TensorIndex], path: Path) -> dict[str, tuple[TensorIndex, TensorIndex, bool]]:
    """The merged model's name of a weight -> (A, B, whether it is an embedding).

    Raises UserError if there are several adapters, or factors without their partner.
    """
    factors: dict[tuple[str, bool], dict[str, TensorIndex]] = defaultdict(dict)
    adapters = set()
    for name, tensor in tensors.items():
        if ".lora_" not in name:
            continue
        match = _FACTOR.match(name)
        if match is None or len(tensor.shape) != 2:
            raise UserError(f"{path}: {name} of shape {list(tensor.shape)} is of an unsupported variant of LoRA")
        adapters.add(match["name"])
        factors[merged_name(match["layer"]), bool(match["kind"])][match["factor"]] = tensor
    if len(adapters) != 1:
        raise UserError(f"{path} has {len(adapters)} adapters ({listing(sorted(adapters))}), not one")
    for (layer, _), pair in factors.items():
        if len(pair) != 2:
            raise UserError(f"{path} has only {listing(pair)} of the adapter of {layer}")
    return {f"{layer}.weight": (pair["A"], pair["B"], kind) for (layer, kind), pair in factors.items()}


def adapter_tensors(reader: CheckpointReader, config: AdapterConfig) -> dict[str, TensorIndex]:
    """The tensors of peft's adapter_model.safetensors. Raises UserError if other parameters were trained."""
    find_factors(reader.weights, reader.path)  # one complete adapter
    trained = set(reader.optimizer_state)
    if reader.frozen and not trained:
        trained = set(reader.weights) - reader.frozen - reader.buffers
    # `peft.get_peft_model_state_dict`: a trained head has the base model's name
    is_alone = not trained and not any(".base_layer." in name for name in reader.names())
    # a plain state dict does not record which parameters were trained: the biases that the config names
    biases = {"all": "bias", "lora_only": ".base_layer.bias"}.get(str(config.content.get("bias")), "\n")
    tensors: dict[str, TensorIndex] = {}
    for name, tensor in reader.weights.items():
        if is_alone or in_adapter(name):
            tensors[saved_name(name)] = tensor
        elif name.endswith(biases) and (name in trained or not trained):
            tensors[name] = tensor
        elif name in trained:
            raise UserError(f"{name} was trained and is not part of the adapter: convert with --merge_lora")
    return tensors
