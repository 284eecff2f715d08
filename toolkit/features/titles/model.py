"""A long-text encoder and a title decoder, both initialised from one checkpoint.

As BERT2BERT of Rothe, Narayan and Severyn (2020, arXiv:1907.12461): only the decoder's
cross-attention is random at first.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    EncoderDecoderModel,
    GenerationConfig,
)

from toolkit.config import PretrainedSettings
from toolkit.errors import UserError
from toolkit.features.titles.settings import KIND, GenerationSettings
from toolkit.models.attention import choose_attention
from toolkit.models.classifier import configure, from_pretrained, set_dropout
from toolkit.pretrained import load_config, refuse_random


def load_title_model(
    settings: PretrainedSettings,
    long: PretrainedSettings,
    generation: GenerationSettings,
    tokenizer: Any,
    max_target_length: int,
    seed: int,
) -> EncoderDecoderModel:
    """The encoder of `long` with the decoder of `settings`, in float32 on the CPU, with equal
    weights on all ranks.

    `settings` names a BERT, a BigBird, or a saved encoder-decoder; `long` is
    `toolkit.models.to_bigbird.long_model` of it. Raises UserError when they cannot be loaded, or
    the decoder has too few positions for `max_target_length`."""
    set_seed(seed)
    if load_config(settings).model_type == KIND:
        model = _saved(settings)
    else:
        encoder = _part(AutoModel, long, load_config(long))
        model = EncoderDecoderModel(encoder=encoder, decoder=_decoder(settings))
    positions = model.config.decoder.max_position_embeddings
    if max_target_length >= positions:
        why = f"the decoder of {settings.model_name_or_path} has {positions} positions"
        raise UserError(f"--max_target_length {max_target_length}: {why}")
    _configure_generation(model, tokenizer, generation, max_target_length)
    decoder_input_ids = torch.ones(1, 8, dtype=torch.long)
    configure(model, settings, decoder_input_ids=decoder_input_ids, use_cache=False)
    return model


def load_saved_title_model(settings: PretrainedSettings) -> EncoderDecoderModel:
    """A fine-tuned encoder-decoder, loaded from its folder."""
    model = _saved(settings)
    choose_attention(model, settings.attn_implementation)
    return model


def _saved(settings: PretrainedSettings) -> EncoderDecoderModel:
    name = str(settings.model_name_or_path)
    config = load_config(settings)
    for part in (config.encoder, config.decoder):
        set_dropout(part, settings.dropout)
    model, loading = from_pretrained(EncoderDecoderModel, name, config)
    refuse_random(name, (key for key in loading["missing_keys"] if "pooler" not in key))
    return model


def _part(auto_class: Any, settings: PretrainedSettings, config: Any) -> Any:
    set_dropout(config, settings.dropout)
    return from_pretrained(auto_class, str(settings.model_name_or_path), config)[0]


def _decoder(settings: PretrainedSettings) -> Any:
    """A BigBird becomes a BERT, which has the same names and logits: with cross-attention
    transformers' BigBird (5.23) gives wrong logits, and it cannot generate."""
    config = load_config(settings)
    if config.model_type == "big_bird":
        if not config.use_bias or config.rescale_embeddings:
            why = (
                "a decoder needs a BigBird with use_bias True and rescale_embeddings False"
            )
            raise UserError(
                f"model {settings.model_name_or_path}: {why}: take another model"
            )
        as_bert = {"model_type": "bert", "architectures": None}
        config = BertConfig.from_dict({**config.to_dict(), **as_bert})
    config.is_decoder = config.add_cross_attention = True
    return _part(AutoModelForCausalLM, settings, config)


def _configure_generation(
    model: Any,
    tokenizer: Any,
    generation: GenerationSettings,
    max_target_length: int,
) -> None:
    """Sets the special tokens and the beam search in the configs that are saved with the model."""
    tokens = {
        "decoder_start_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model.config.update(tokens)
    model.config.vocab_size = model.config.decoder.vocab_size
    # for DeepSpeed's `auto` sizes
    model.config.hidden_size = model.config.encoder.hidden_size
    model.generation_config = GenerationConfig(
        **tokens,
        num_beams=generation.num_beams,
        max_new_tokens=max_target_length,
        no_repeat_ngram_size=generation.no_repeat_ngram_size,
    )
