"""A long-text encoder and a title decoder, both initialised from one checkpoint.

As BERT2BERT of Rothe, Narayan and Severyn (2020, arXiv:1907.12461): only the decoder's cross-attention is
random at first.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    EncoderDecoderModel,
    GenerationConfig,
)

from toolkit.config import PretrainedSettings
from toolkit.errors import UserError
from toolkit.features.titles.settings import KIND, GenerationSettings
from toolkit.models.attention import choose_attention
from toolkit.models.classifier import configure, from_pretrained, set_dropout
from toolkit.pretrained import (
    explain_load_errors,
    load_config,
    quiet_transformers,
    refuse_random,
    whole_weights,
)


def load_title_model(
    settings: PretrainedSettings,
    long: PretrainedSettings,
    generation: GenerationSettings,
    tokenizer: Any,
    max_target_length: int,
    seed: int,
) -> EncoderDecoderModel:
    """The encoder of `long` with the decoder of `settings`, in float32 on the CPU, with equal weights on all ranks.

    `settings` names a BERT, a BigBird, or a saved encoder-decoder; `long` is `toolkit.models.to_bigbird.long_model` of
    it. Raises UserError when they cannot be loaded, or the decoder has too few positions for `max_target_length`.
    """
    name = str(settings.model_name_or_path)
    set_seed(seed)
    with explain_load_errors(name), whole_weights(), quiet_transformers():
        if load_config(settings).model_type == KIND:
            model = _saved(settings)
        else:
            model = EncoderDecoderModel(
                encoder=_part(AutoModel, long, load_config(long)), decoder=_decoder(settings)
            )
    positions = getattr(model.config.decoder, "max_position_embeddings", None)
    if positions and max_target_length >= positions:
        why = f"the decoder of {name} has {positions} positions"
        raise UserError(
            f"--max_target_length {max_target_length}: {why}; pass at most {positions - 1}"
        )
    _configure_generation(model, tokenizer, generation, max_target_length)
    configure(
        model, settings, decoder_input_ids=torch.ones(1, 8, dtype=torch.long), use_cache=False
    )
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
    config = load_config(settings)
    sparse = config.model_type == "big_bird"
    if sparse:
        if not config.use_bias or config.rescale_embeddings:
            why = "a decoder needs a BigBird with use_bias True and rescale_embeddings False"
            raise UserError(f"model {settings.model_name_or_path}: {why}: take another model")
        config.attention_type = "original_full"
    config.is_decoder = config.add_cross_attention = True
    decoder = _part(AutoModelForCausalLM, settings, config)
    return _as_bert(decoder) if sparse else decoder


def _as_bert(decoder: Any) -> BertLMHeadModel:
    """A BERT decoder with a BigBird decoder's weights and the same logits; with cross-attention transformers' BigBird
    (5.23) gives wrong logits, and it cannot generate."""
    config = BertConfig.from_dict(
        {**decoder.config.to_dict(), "model_type": "bert", "architectures": None}
    )
    bert = BertLMHeadModel(config)
    weights = {
        name: weight for name, weight in decoder.state_dict().items() if "pooler" not in name
    }
    bert.load_state_dict(weights)
    return bert


def _configure_generation(
    model: Any, tokenizer: Any, generation: GenerationSettings, max_target_length: int
) -> None:
    """Sets the special tokens and the beam search in the configs that are saved with the model."""
    special_tokens = {
        "decoder_start_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    # hidden_size for DeepSpeed's `auto` sizes
    sizes = {
        "vocab_size": model.config.decoder.vocab_size,
        "hidden_size": model.config.encoder.hidden_size,
    }
    model.config.update({**special_tokens, **sizes})
    beams = {"length_penalty": generation.length_penalty} if generation.num_beams > 1 else {}
    model.generation_config = GenerationConfig(
        **special_tokens, **beams, bos_token_id=tokenizer.cls_token_id, max_new_tokens=max_target_length,
        num_beams=generation.num_beams, no_repeat_ngram_size=generation.no_repeat_ngram_size, do_sample=False,
        use_cache=True,
    )  # fmt: skip
