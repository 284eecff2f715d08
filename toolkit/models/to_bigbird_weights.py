"""The weights and the config of a BERT, under BigBird's names.

P positions of the BERT, L of the BigBird, H hidden
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import BertForPreTraining, BigBirdConfig, BigBirdForMaskedLM, BigBirdForPreTraining, BigBirdModel

from toolkit.demo import model_path
from toolkit.errors import UserError, listing
from toolkit.pretrained import explained, full_attention_up_to, quiet_transformers, whole_weights

_ENCODER = re.compile(r"(bert\.)?(embeddings|encoder|pooler)\.")
POOLER, _DECODER = "bert.pooler.", "cls.predictions.decoder.weight"
_HEADS = {"MLM": "cls.predictions.", "NSP": "cls.seq_relationship."}
_FAMILIES = {(): BigBirdModel, ("MLM",): BigBirdForMaskedLM, ("MLM", "NSP"): BigBirdForPreTraining}
_COPIED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "type_vocab_size",
    "initializer_range", "layer_norm_eps", "pad_token_id", "tie_word_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class Pattern:
    """How far a BigBird reads, and what each token in it attends to."""

    max_length: int  # tokens
    block_size: int  # tokens
    random: int  # blocks that each block of queries reads besides its neighbours

    @property
    def sparse_above(self) -> int:
        """Tokens up to which the pattern does not fit."""
        return full_attention_up_to(self.block_size, self.random)


@dataclass(frozen=True)
class LoadedBert:
    """A BERT in memory."""

    model: Any
    """BertForPreTraining; what the checkpoint has not is random in it, and in `fresh`."""
    fresh: frozenset[str]
    """Names in `model` that did not come from the checkpoint."""
    unknown: tuple[str, ...]
    """Names in the checkpoint that `model` has no place for."""

    def has(self, prefix: str) -> bool:
        return not any(name.startswith(prefix) for name in self.fresh)

    @property
    def heads(self) -> tuple[str, ...]:
        if not self.has(_HEADS["MLM"]):
            return ()
        return ("MLM", "NSP") if self.has(_HEADS["NSP"]) and self.has(POOLER) else ("MLM",)


def load(name: str) -> LoadedBert:
    """Whatever head the checkpoint has: BertForPreTraining holds them all, but for those of a task."""
    with explained(name), whole_weights(), quiet_transformers():
        model, loading = BertForPreTraining.from_pretrained(
            model_path(name), dtype="auto", ignore_mismatched_sizes=True, output_loading_info=True
        )
    fresh = frozenset([*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])])
    unknown = tuple(loading["unexpected_keys"])
    lost = {key for key in fresh if key.startswith("bert.") and not key.startswith(POOLER)}
    lost |= {key for key, *_ in loading["mismatched_keys"] if key.startswith("bert.")}
    pooler = {key for key in fresh if key.startswith(POOLER)}
    lost |= pooler if len(pooler) == 1 else set()  # half of it
    lost |= {key for key in unknown if _ENCODER.match(key)}  # layers that the config does not count
    if lost:
        raise UserError(
            f"{name}: its weights do not fit its config.json ({listing(sorted(lost), 3)}): name the folder the "
            "weights belong to"
        )
    return LoadedBert(model, fresh, unknown)


def config_of(bert: Any, tokenizer: Any, pattern: Pattern) -> BigBirdConfig:
    """BERT's sizes and its tokenizer's ids; BigBird's own defaults are those of another vocabulary."""
    kept = {name: getattr(bert.config, name) for name in _COPIED}
    # told by the weights: transformers leaves an output layer of its own untied, whatever the config says
    kept["tie_word_embeddings"] = bert.get_output_embeddings().weight is bert.get_input_embeddings().weight
    if kept["pad_token_id"] is None:
        kept["pad_token_id"] = tokenizer.pad_token_id
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
    return BigBirdConfig(
        **kept,
        max_position_embeddings=pattern.max_length,
        attention_type="block_sparse",
        block_size=pattern.block_size,
        num_random_blocks=pattern.random,
        rescale_embeddings=False,
        use_bias=True,
        bos_token_id=tokenizer.cls_token_id if first is None else first,
        eos_token_id=tokenizer.sep_token_id if last is None else last,
        sep_token_id=tokenizer.sep_token_id,
        cls_token_id=tokenizer.cls_token_id,
    )


def build(name: str, source: LoadedBert, config: BigBirdConfig) -> Any:
    """The BigBird, every parameter of which is the source's. Raises UserError when one is not."""
    state, family = _weights(source, config.max_position_embeddings), _FAMILIES[source.heads]
    with whole_weights(), quiet_transformers():
        model, loading = family.from_pretrained(
            None, config=config, state_dict=state, dtype=source.model.dtype, output_loading_info=True
        )
    if not source.has(POOLER):  # a random one would pass for pretrained
        encoder = getattr(model, "bert", model)
        encoder.pooler, encoder.activation = None, None
    parameters = {key for key, _ in model.named_parameters()}
    random = parameters & {*loading["missing_keys"]} | {*loading["unexpected_keys"]}
    if random:
        raise UserError(f"{name}: {listing(sorted(random), 3)} do not fit a BigBird: is it a BERT of transformers?")
    return model


def _weights(source: LoadedBert, length: int) -> dict[str, torch.Tensor]:
    """The source's tensors under BigBird's names, the position table (length, H)."""
    state = {key: value for key, value in source.model.state_dict().items() if key not in source.fresh}
    for key in unused_heads(source) | ({_DECODER} if not source.heads else set()):
        state.pop(key, None)  # an untied output layer that was random is not there
    table = "bert.embeddings.position_embeddings.weight"
    state[table] = tiled(state[table], length)
    state = {key.replace("bert.pooler.dense.", POOLER): value for key, value in state.items()}
    return state if source.heads else {key.removeprefix("bert."): value for key, value in state.items()}


def unused_heads(source: LoadedBert) -> set[str]:
    """Weights of heads that are not whole, like NSP without MLM; the tied output layer is nobody's head."""
    prefixes = ("bert.", *(_HEADS[head] for head in source.heads))
    present = set(source.model.state_dict()) - source.fresh - {_DECODER}
    return {key for key in present if not key.startswith(prefixes)}


def tiled(table: torch.Tensor, length: int) -> torch.Tensor:
    """(P, H) -> (length, H): its rows over and over, so that neighbours stay neighbours but at the seams."""
    return table[torch.arange(length) % table.shape[0]]


def save(model: Any, folder: Path) -> None:
    """config.json and model.safetensors. `save_pretrained` writes them in the first process of a group only, and in
    others returns without a word; here whoever comes first writes."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.to_json_file(folder / "config.json")
    parameters = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}  # tied: once
    save_file(parameters, folder / "model.safetensors", metadata={"format": "pt"})
