"""Which tensors a conversion writes, under which names, and from where. LoRA is merged as peft does, without peft."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoint.lora import FACTOR, PREFIX, is_adapters, merged_name, saved_name, stays
from toolkit.checkpoint.reader import FLOATS, ITEM_BYTES, CheckpointReader, Member, TensorIndex
from toolkit.errors import UserError, listing

if TYPE_CHECKING:  # numpy, which a look at a checkpoint and most conversions do without
    from toolkit.checkpoint.convert.casts import LoraDelta

ADAPTER_CONFIG = "adapter_config.json"
# Layers of wrapping that are no part of a model: torch.compile, FSDP, activation checkpointing.
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Variants that change what a merged weight is; each key is in adapter_config.json when it is in use.
_UNSUPPORTED = (
    "use_dora", "lora_bias", "use_qalora", "use_bdlora", "layer_replication", "target_parameters",
    "trainable_token_indices", "alora_invocation_tokens", "megatron_config", "arrow_config", "kasa_config",
    "velora_config", "monteclora_config",
)  # fmt: skip
# Ways to initialise that change the base weights too: a base model from elsewhere does not fit.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Output:
    """A tensor to write."""

    name: str
    stored: TensorIndex
    delta: LoraDelta | None = None
    """What a LoRA adapter adds."""

    def dtype(self, wanted: str) -> str:
        """Floating numbers become `wanted`; whole numbers and truth values stay as they are."""
        return wanted if self.stored.dtype in FLOATS else self.stored.dtype

    def size(self, wanted: str) -> int:
        """Bytes."""
        return self.stored.count * ITEM_BYTES[self.dtype(wanted)]


@dataclass(frozen=True)
class Selection:
    """What is written, in the model's order."""

    outputs: list[Output]
    checked: list[Member] = field(default_factory=list)
    """Members whose numbers enter a sum: to be checked although they are not copied."""
    is_adapter: bool = False


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Name in the checkpoint -> the model's own: without wrappers, and without a prefix that all have."""
    cleaned = {name: _WRAPPERS.sub("", name) for name in names}
    while cleaned and all(short.startswith("module.") for short in cleaned.values()):
        cleaned = {name: short.removeprefix("module.") for name, short in cleaned.items()}
    return cleaned


def _tensors_of(reader: CheckpointReader) -> tuple[dict[str, TensorIndex], dict[str, tuple[int, ...]]]:
    """(parameters and buffers, parameters left out of the checkpoint with their shapes), by the model's names.

    Raises UserError when the checkpoint holds no tensor, or two under one name.
    """
    stored = {**reader.weights, **reader.buffers}
    names = clean_names([*stored, *reader.excluded])
    if not stored:
        raise UserError(f"{reader.path} holds no weights")
    twice = sorted(name for name, count in Counter(names.values()).items() if count > 1)
    if twice:
        raise UserError(f"{reader.path} holds several tensors under one name: {listing(twice)}")
    held = {names[name]: tensor for name, tensor in stored.items()}
    return held, {names[name]: tuple(shape) for name, shape in reader.excluded.items()}


def select_plain(reader: CheckpointReader, base: CheckpointReader | None) -> Selection:
    """Every parameter and buffer of a plain model; those left out of the checkpoint come from `base`.

    A tied parameter is written once, under the name that the checkpoint keeps it by: `from_pretrained`
    ties the others to it. Raises UserError when a parameter is neither in the checkpoint nor in `base`.
    """
    held, excluded = _tensors_of(reader)
    tied = clean_names([*held, *reader.tied])
    supplied = _from_base(reader, base, held, excluded, {tied[name] for name in reader.tied})
    return Selection([Output(name, tensor) for name, tensor in {**held, **supplied}.items()])


def _from_base(
    reader: CheckpointReader,
    base: CheckpointReader | None,
    held: Collection[str],
    wanted: Mapping[str, tuple[int, ...] | None],
    tied: Collection[str] = (),
) -> dict[str, TensorIndex]:
    """What the base model's folder adds to the parameters that a checkpoint holds, under the model's names.

    A base model's names may lack the prefix of a model with a head (`bert.`), or have it where the model
    has none. DeepSpeed does not write down which parameters it leaves out: then everything of the base
    model is taken that the checkpoint does not hold.

    Args:
        held: names in the checkpoint, those of `tied` apart.
        wanted: parameters that are known to be left out -> shape, or None where the checkpoint does not say.

    Raises:
        UserError: no base model is given, or it lacks a wanted parameter, or has it in another shape.
    """
    if base is None:
        named = reader.details.get("base_model") or ""
        if wanted:
            raise UserError(
                f"{reader.path} leaves {len(wanted)} frozen parameters out ({listing(wanted, 3)}): "
                f"say where the base model{named and f', {named},'} is with --base_model FOLDER"
            )
        return {}
    known = _renamed({**base.weights, **base.buffers}, {*held, *wanted})
    missing = [name for name in wanted if name not in known]
    if missing:
        raise UserError(
            f"--base_model {base.path} lacks {len(missing)} of the {len(wanted)} parameters that "
            f"{reader.path} leaves out: {listing(missing, 5)}"
        )
    for name, shape in wanted.items():
        if shape is not None and known[name].shape != shape:
            raise UserError(
                f"{name} is of shape {list(known[name].shape)} in {base.path} and of {list(shape)} in the model of "
                f"{reader.path}: --base_model is not the model that was trained"
            )
    taken = wanted if reader.excluded else [name for name in known if name not in held and name not in tied]
    return {name: known[name] for name in taken}


def _renamed(known: Mapping[str, TensorIndex], names: Collection[str]) -> dict[str, TensorIndex]:
    """The base model's tensors by the model's names: as they are, or with one prefix more or less."""
    prefixes = sorted({name.split(".")[0] + "." for name in (*known, *names)})
    ways = [dict(known)]
    ways += [{prefix + name: tensor for name, tensor in known.items()} for prefix in prefixes]
    ways += [{name.removeprefix(prefix): tensor for name, tensor in known.items()} for prefix in prefixes]
    return max(ways, key=lambda way: sum(name in way for name in names))  # the first of equals


# LoRA


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
        patterns = self.content.get(key) or {}
        return next((value for name, value in patterns.items() if re.match(rf"(.*\.)?({name})$", layer)), default)


def is_lora(reader: CheckpointReader) -> bool:
    """Whether the parameters are those of a model with a LoRA adapter."""
    return any(FACTOR.match(name) for name in reader.weights)


def read_adapter_config(folder: Path | None, reader: CheckpointReader) -> AdapterConfig:
    """Raises UserError when the folder has no adapter_config.json, or one of a kind that is not supported."""
    if folder is None or not (path := folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"{reader.path} is of a model with a LoRA adapter, and its {ADAPTER_CONFIG} is not there: "
            "name the folder that has it with --config_from FOLDER"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["peft_type"] != "LORA":
            raise ValueError(f"peft_type {content['peft_type']}")
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not of LoRA ({error}): only LoRA adapters can be converted") from None
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
    held, excluded = _tensors_of(reader)
    factors = _factors(reader, held)
    plain = {merged_name(name): tensor for name, tensor in held.items() if stays(name)}
    left_out = {merged_name(name): shape for name, shape in excluded.items() if stays(name)}
    wanted: dict[str, tuple[int, ...] | None] = {name: None for name in factors if name not in plain}
    wanted |= {name: shape for name, shape in left_out.items() if name not in plain}
    initial = str(config.content.get("init_lora_weights")).lower()
    if wanted and initial.startswith(_CHANGES_BASE):
        raise UserError(f"{config.path}: {initial} changes the base weights, which the checkpoint leaves out")
    plain |= _from_base(reader, base, plain, wanted)
    outputs = [
        Output(name, tensor, _delta(name, tensor, factors[name], config) if name in factors else None)
        for name, tensor in plain.items()
    ]
    spans = [span for pair in factors.values() for tensor in pair.values() for span in tensor.spans]
    return Selection(outputs, list(dict.fromkeys(span.member for span in spans)))


def _factors(reader: CheckpointReader, held: Mapping[str, TensorIndex]) -> dict[str, dict[str, TensorIndex]]:
    """Weight (its name in the merged model) -> its factors under `A`, `B`, `embedding_A` and `embedding_B`."""
    factors: dict[str, dict[str, TensorIndex]] = {}
    adapters = set()
    for name, tensor in held.items():
        if ".lora_" not in name:
            continue
        match = FACTOR.match(name)
        if match is None or len(tensor.shape) != 2:
            raise UserError(
                f"{reader.path}: {name} of shape {list(tensor.shape)} is of a variant of LoRA not known here"
            )
        adapters.add(match["adapter"])
        weight = f"{merged_name(match['layer'])}.weight"
        factors.setdefault(weight, {})[(match["kind"] or "") + match["factor"]] = tensor
    if len(adapters) != 1:
        raise UserError(f"{reader.path} holds {len(adapters)} adapters ({listing(sorted(adapters))}), not one")
    for weight, pair in factors.items():
        if set(pair) not in ({"A", "B"}, {"embedding_A", "embedding_B"}):
            layer = weight.removesuffix(".weight")
            raise UserError(f"{reader.path} holds only {listing(pair)} of the adapter of {layer}")
    return factors


def _delta(name: str, base: TensorIndex, pair: Mapping[str, TensorIndex], config: AdapterConfig) -> LoraDelta:
    from toolkit.checkpoint.convert.casts import LoraDelta

    a, b = (pair[key] for key in sorted(pair))
    layer = name.removesuffix(".weight")
    transposed = "embedding_A" in pair or bool(config.content.get("fan_in_fan_out"))
    delta = LoraDelta(a, b, config.scaling(layer, a.shape[0]), transposed)
    if delta.shape != base.shape or a.shape[0] != b.shape[1]:
        raise UserError(f"the adapter of {layer} is of shape {list(delta.shape)} and its weight of {list(base.shape)}")
    return delta


def select_adapter(reader: CheckpointReader, config: AdapterConfig) -> Selection:
    """The adapter under the names of peft's adapter_model.safetensors.

    Raises UserError when other parameters were trained as well: an adapter folder cannot hold them.
    """
    held, _ = _tensors_of(reader)
    _factors(reader, held)  # one adapter, whole
    adapters = {saved_name(name): tensor for name, tensor in held.items() if is_adapters(name)}
    buffers, frozen = {_bare(name) for name in reader.buffers}, {_bare(name) for name in reader.frozen}
    trained = {_bare(name) for name in reader.optimizer_state}
    for name, tensor in held.items():
        is_trained = name in trained if trained else bool(frozen) and name not in frozen
        if is_adapters(name) or name in buffers or not is_trained:
            continue
        if not (name.endswith("bias") and config.content.get("bias") in ("all", "lora_only")):
            raise UserError(
                f"{name} was trained and is no part of the adapter: write the whole model with --merge_lora"
            )
        adapters[name] = tensor
    return Selection([Output(name, tensor) for name, tensor in adapters.items()], is_adapter=True)


def _bare(name: str) -> str:
    return name[name.index(PREFIX) :] if PREFIX in name else name
