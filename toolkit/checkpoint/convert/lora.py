"""Checkpoints of a model with a LoRA adapter: merged into the base model, or the adapter alone.

Names and formulas are peft's (`peft.tuners.lora`); peft itself is not needed. Under `base_model.model.` a
live model holds X.base_layer.weight, X.lora_A.NAME.weight and X.lora_B.NAME.weight for a layer with LoRA,
H.original_module.* and H.modules_to_save.NAME.* for a head that is trained whole.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoint.convert.outputs import Output, Selection, from_base, tensors_of
from toolkit.checkpoint.reader import CheckpointReader, Member, TensorIndex
from toolkit.errors import UserError, listing

if TYPE_CHECKING:
    from toolkit.checkpoint.convert.lora_delta import Delta

CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
_FACTOR = re.compile(
    r"(?P<layer>.*)\.lora_(?P<kind>embedding_)?(?P<factor>[AB])\.(?P<adapter>[^.]+)(?P<end>\.weight)?$"
)
_TRAINED_HEAD = re.compile(r"\.modules_to_save\.[^.]+\.")
# Variants that change what a merged weight is; each key is in adapter_config.json when it is in use.
_UNSUPPORTED = (
    "use_dora", "lora_bias", "use_qalora", "use_bdlora", "layer_replication", "target_parameters",
    "trainable_token_indices", "alora_invocation_tokens", "megatron_config", "arrow_config", "kasa_config",
    "velora_config", "monteclora_config",
)  # fmt: skip
# Ways to initialise that change the base weights too: a base model from elsewhere does not fit.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says, as far as it bears on the weights."""

    path: Path
    content: Mapping[str, Any]

    def scaling(self, layer: str, rank: int) -> float:
        """What B @ A is multiplied by. Raises UserError when the config is not of this adapter.

        `layer`: without `base_model.model.`.
        """
        expected = self._pattern("rank_pattern", layer, self.content.get("r"))
        if expected != rank:
            raise UserError(f"{self.path} gives {layer} rank {expected} and the checkpoint {rank}: another adapter's")
        alpha = self._pattern("alpha_pattern", layer, self.content.get("lora_alpha"))
        if not isinstance(alpha, int | float):
            raise UserError(f"{self.path} has no lora_alpha: take the adapter_config.json that training saved")
        return float(alpha / (math.sqrt(rank) if self.content.get("use_rslora") else rank))

    def _pattern(self, key: str, layer: str, default: Any) -> Any:
        for pattern, value in (self.content.get(key) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", layer):
                return value
        return default


def is_lora(reader: CheckpointReader) -> bool:
    """Whether the parameters are those of a model with a LoRA adapter."""
    return any(_FACTOR.match(name) for name in reader.weights)


def read_config(folder: Path | None, reader: CheckpointReader) -> AdapterConfig:
    """Raises UserError when the folder has no adapter_config.json, or one of a kind that is not supported."""
    path = folder / CONFIG if folder else None
    if path is None or not path.is_file():
        raise UserError(
            f"{reader.path} is of a model with a LoRA adapter, and its {CONFIG} is not there: "
            "name the folder that has it with --config_from FOLDER"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("peft_type") != "LORA":
        raise UserError(f"{path} is not of LoRA: only LoRA adapters can be converted")
    return AdapterConfig(path, content)


def select_merged(reader: CheckpointReader, config: AdapterConfig, base: CheckpointReader | None) -> Selection:
    """The plain model: W + scaling * B @ A, summed in fp32, and the trained heads in place of the old ones.

    Raises UserError for variants of LoRA whose merge is not this sum, and for missing parameters.
    """
    used = [key for key in _UNSUPPORTED if config.content.get(key)]
    if used:
        raise UserError(
            f"{config.path} uses {listing(used)}: such adapters are merged by peft alone (merge_and_unload)"
        )
    held, excluded = tensors_of(reader)
    factors = _factors(reader, held)
    plain = {_plain(name): tensor for name, tensor in held.items() if _stays(name)}
    wanted = _wanted(plain, excluded, factors)
    initial = str(config.content.get("init_lora_weights")).lower()
    if wanted and initial.startswith(_CHANGES_BASE):
        raise UserError(f"{config.path}: {initial} changes the base weights, which the checkpoint leaves out")
    plain |= from_base(reader, base, plain, wanted)
    outputs = [Output(name, tensor, _delta(name, tensor, factors, config)) for name, tensor in plain.items()]
    return Selection(outputs, _members(tensor for pair in factors.values() for tensor in pair.values()))


def select_adapter(reader: CheckpointReader, config: AdapterConfig) -> Selection:
    """The adapter under the names of peft's adapter_model.safetensors.

    Raises UserError when other parameters were trained as well: an adapter folder cannot hold them.
    """
    held, _ = tensors_of(reader)
    _factors(reader, held)  # one adapter, whole
    adapters = {_saved(name): tensor for name, tensor in held.items() if _is_adapters(name)}
    frozen = {_bare(name) for name in reader.frozen} or None
    trained = {_bare(name) for name in reader.optimizer_state}
    for name, tensor in held.items():
        is_trained = name in trained if trained else frozen is not None and name not in frozen
        if _is_adapters(name) or name in _bare_buffers(reader) or not is_trained:
            continue
        if not (name.endswith("bias") and config.content.get("bias") in ("all", "lora_only")):
            raise UserError(
                f"{name} was trained and is no part of the adapter: write the whole model with --merge_lora"
            )
        adapters[name] = tensor
    return Selection([Output(name, tensor) for name, tensor in adapters.items()], is_adapter=True)


def _bare(name: str) -> str:
    return name[name.index(_PREFIX) :] if _PREFIX in name else name


def _bare_buffers(reader: CheckpointReader) -> set[str]:
    return {_bare(name) for name in reader.buffers}


def _factors(reader: CheckpointReader, held: Mapping[str, TensorIndex]) -> dict[str, dict[str, TensorIndex]]:
    """Layer (plain name) -> its factors under `A`, `B`, `embedding_A` and `embedding_B`."""
    factors: dict[str, dict[str, TensorIndex]] = {}
    adapters = set()
    for name, tensor in held.items():
        if ".lora_" not in name:
            continue
        match = _FACTOR.match(name)
        if match is None or len(tensor.shape) != 2:
            raise UserError(
                f"{reader.path}: {name} of shape {list(tensor.shape)} is of a variant of LoRA not known here"
            )
        adapters.add(match["adapter"])
        factors.setdefault(_plain(match["layer"]), {})[(match["kind"] or "") + match["factor"]] = tensor
    if len(adapters) != 1:
        raise UserError(f"{reader.path} holds {len(adapters)} adapters ({listing(sorted(adapters))}), not one")
    for layer, pair in factors.items():
        if len(pair) != 2 or not {kind[-1] for kind in pair} == {"A", "B"}:
            raise UserError(f"{reader.path} holds only {listing(pair)} of the adapter of {layer}")
    return factors


def _delta(
    name: str, base: TensorIndex, factors: Mapping[str, dict[str, TensorIndex]], config: AdapterConfig
) -> Delta | None:
    pair = factors.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
    if pair is None:
        return None
    from toolkit.checkpoint.convert.lora_delta import Delta  # numpy, which --inspect and errors do without

    is_embedding = "embedding_A" in pair
    a, b = (pair["embedding_A"], pair["embedding_B"]) if is_embedding else (pair["A"], pair["B"])
    layer = name.removesuffix(".weight")
    transposed = is_embedding or bool(config.content.get("fan_in_fan_out"))
    delta = Delta(a, b, config.scaling(layer, a.shape[0]), transposed)
    if delta.shape != base.shape or a.shape[0] != b.shape[1]:
        raise UserError(f"the adapter of {layer} is of shape {list(delta.shape)} and its weight of {list(base.shape)}")
    return delta


def _wanted(
    plain: Mapping[str, TensorIndex], excluded: Mapping[str, tuple[int, ...]], factors: Iterable[str]
) -> dict[str, tuple[int, ...] | None]:
    """What only the base model has: what the checkpoint says it leaves out, and the weights with an adapter."""
    wanted: dict[str, tuple[int, ...] | None] = {
        _plain(name): shape for name, shape in excluded.items() if _stays(name) and _plain(name) not in plain
    }
    wanted |= {f"{layer}.weight": None for layer in factors if f"{layer}.weight" not in {**plain, **wanted}}
    return wanted


def _stays(name: str) -> bool:
    """Whether a live parameter has a place in the merged model."""
    return ".lora_" not in name and ".original_module." not in name


def _is_adapters(name: str) -> bool:
    return ".lora_" in name or _TRAINED_HEAD.search(name) is not None


def _plain(name: str) -> str:
    """A live parameter's name in the plain model."""
    return _TRAINED_HEAD.sub(".", name.removeprefix(_PREFIX).replace(".base_layer.", "."))


def _saved(name: str) -> str:
    """A live parameter's name in an adapter folder."""
    match = _FACTOR.match(name)
    if match:
        return f"{match['layer']}.lora_{match['kind'] or ''}{match['factor']}{match['end'] or ''}"
    return _TRAINED_HEAD.sub(".", name)


def _members(tensors: Iterable[TensorIndex]) -> list[Member]:
    found: Collection[Member] = dict.fromkeys(span.member for tensor in tensors for span in tensor.spans)
    return list(found)
