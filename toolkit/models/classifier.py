"""Loads classifiers: any `AutoModelForSequenceClassification` checkpoint, with equal weights in
every process."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed  # transformers' own imports peft, for a second
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForSequenceClassification,
)

from toolkit.config import ModelSettings, PretrainedSettings
from toolkit.errors import UserError, listing
from toolkit.models.attention import choose_attention
from toolkit.models.first_token import read_first_token_only
from toolkit.models.layers import freeze_layers, keep_layers, reinit_head, reinit_layers
from toolkit.models.lora import add_lora
from toolkit.pretrained import (
    explain_load_errors,
    load_config,
    load_plain_tokenizer,
    quiet_transformers,
    refuse_random,
    whole_weights,
)
from toolkit.utils.log import log_on_rank_0
from toolkit.utils.modules import autograd_leaves

_ADAPTER = "adapter_config.json"
_NOWHERE = {"subfolder": "not-applied"}
"""Where `from_pretrained` looks for an adapter."""
_OTHER_HEAD = re.compile(r"(?!vocab_|lm_|qa_)\w+(\.\d+)?\.weight")
"""The weight of a head that somebody's own class has named (`fc.weight`), not one of pretraining."""
_LAYER = re.compile(r"\blayers?\.(\d+)\.")


def load_classifier(settings: ModelSettings, labels: Any, seed: int) -> Any:
    """The pretrained encoder with a head for the `names` and the `problem_type` of the labels, in
    float32 on the CPU; with `lora_r`, a PeftModel.

    A new head and LoRA are initialized by the seed: equal in every process under every strategy,
    since nothing is sharded before `accelerator.prepare`. Raises UserError if the model cannot be
    loaded or an option does not fit.
    """
    name = str(settings.model_name_or_path)
    config = load_config(settings)
    saved_names = [str(label) for _, label in sorted(config.id2label.items())]
    config.problem_type = labels.problem_type
    config.id2label = dict(enumerate(labels.names))
    config.label2id = {label: index for index, label in enumerate(labels.names)}
    configure_decoder(config, name)
    set_dropout(config, settings.dropout)
    set_seed(seed)
    model, loading = from_pretrained(
        AutoModelForSequenceClassification,
        name,
        config,
        settings.attn_implementation,
        ignore_mismatched_sizes=True,  # replaces a head of another size
    )
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        kind = type(model).__name__
        raise UserError(f"model {name}: {kind} would read padding as part of the text")
    new = [*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])]
    # only a head and a pooler may be new
    prefix = f"{model.base_model_prefix}."
    refuse_random(
        name, (key for key in new if key.startswith(prefix) and "pooler" not in key)
    )
    if all(key.startswith(prefix) for key in new):
        log_on_rank_0(
            f"{name}: its classifier is {_fit_head(model, saved_names, labels, seed)}"
        )
    elif loading["mismatched_keys"]:
        log_on_rank_0(
            f"{name}: its classifier is new, as it had {len(saved_names)} classes"
        )
    if _other_head(loading):
        log_on_rank_0(f"{name}: its classifier is new. {_other_head(loading)}")
    _change_layers(model, settings, seed)
    configure(model, settings)
    read_first_token_only(model)
    if settings.lora_r:
        with whole_weights():
            model = add_lora(model, settings, new)
        freeze_unused(model)
    return model


def _other_head(loading: Any) -> str:
    """What to do with a head whose name transformers does not know; empty if there is none."""
    missing = sorted(key for key in loading["missing_keys"] if key.endswith(".weight"))
    others = sorted(filter(_OTHER_HEAD.fullmatch, loading["unexpected_keys"]))
    if not missing or not others:
        return ""
    return (
        f"If {listing(others)} of the file is its head, rename it to {missing[-1]}, and its bias "
        "alike (safetensors.torch.load_file, save_file)"
    )


def _fit_head(model: Any, saved: list[str], labels: Any, seed: int) -> str:
    """Makes the head of a checkpoint with classes `saved`, as many as the data's, one for the
    data's classes. Returns what it is now, and why."""
    names = list(labels.names)
    if saved == names:
        return "kept"
    if set(saved) == set(names):
        _reorder_head(model, [saved.index(name) for name in names])
        return "kept, its outputs in the order of the data's classes"
    if all(re.fullmatch(r"LABEL_\d+", name) for name in saved):
        return f"kept by position, as its classes have no names: {listing(names)}"
    reinit_head(model, seed)
    return f"new, as its classes were {listing(saved)}"


def _reorder_head(model: Any, order: list[int]) -> None:
    """Raises UserError for a head without a linear layer."""
    heads = [
        part
        for name, part in model.named_modules()
        if not name.startswith(f"{model.base_model_prefix}.")
        and getattr(part, "out_features", None) == len(order)
    ]
    if not heads:
        raise UserError(
            f"{type(model).__name__} has the data's classes in another order, and no linear layer "
            "as its head: reorder its outputs"
        )
    for parameter in heads[-1].parameters():
        parameter.data = parameter.data[order]


def _change_layers(model: Any, settings: ModelSettings, seed: int) -> None:
    if settings.num_hidden_layers:
        keep_layers(model, settings.num_hidden_layers)
    if settings.reinit_layers:
        reinit_layers(model, settings.reinit_layers, seed)
    if settings.freeze_layers is not None:
        freeze_layers(model, settings.freeze_layers, settings.reinit_layers or 0)


def from_pretrained(
    auto_class: Any, name: str, config: Any, attention: str | None = None, **options: Any
) -> tuple[Any, Any]:
    """(a model with all of its weights, in float32 unless `dtype` is among the options,
    transformers' loading info). Raises UserError, also for weights of more layers than the config
    has, which transformers drops silently.

    An adapter beside the weights is left out, with a line: a merged model would get it twice."""
    options.setdefault("dtype", torch.float32)
    if (Path(name) / _ADAPTER).is_file():
        log_on_rank_0(
            f"{name}: the adapter beside the weights is not applied (`toolkit convert` merges one)"
        )
    # `choose_attention` installs a BigBird's
    if attention and config.model_type != "big_bird":
        options["attn_implementation"] = attention
    with (
        explain_load_errors(name, attention) as path,
        whole_weights(),
        quiet_transformers(),
    ):
        model, loading = auto_class.from_pretrained(
            path,
            config=config,
            trust_remote_code=False,
            output_loading_info=True,
            adapter_kwargs=_NOWHERE,
            **options,
        )
    for key, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise UserError(f"model {name}: {key} has NaN or infinity: copy it again")
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if layers is not None:
        found = {key: _LAYER.search(key) for key in loading["unexpected_keys"]}
        refuse_random(
            name, (key for key, at in found.items() if at and int(at[1]) >= layers)
        )
    return model, loading


def configure_decoder(config: Any, name: str) -> None:
    """Makes a decoder (Qwen3) classify: sets its padding token to the tokenizer's, since the head
    reads each text's last token before padding, and switches off the key-value cache. Changes
    nothing for an encoder."""
    config = config.get_text_config()
    is_decoder = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    is_encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING
    if (is_decoder and not is_encoder) or getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = load_plain_tokenizer(name).pad_token_id
    config.use_cache = False


def configure(model: Any, settings: PretrainedSettings, **inputs: Any) -> None:
    """Installs the attention, turns gradient checkpointing on, and freezes unused parameters
    (`inputs`: see `freeze_unused`). Raises ValueError if the model does not support it."""
    choose_attention(model, settings.attn_implementation)
    if settings.gradient_checkpointing:
        # transformers 5.18 has the old name only
        old_enable = model.gradient_checkpointing_enable
        enable = getattr(model, "activation_checkpointing_enable", old_enable)
        enable({"use_reentrant": False})
    freeze_unused(model, **inputs)


def freeze_unused(model: Any, **inputs: Any) -> None:
    """Freezes trainable parameters that the logits do not depend on (an unused pooler).

    DDP raises for them, and sharded optimizers would decay them. Takes one forward pass of a short
    sample, and searches the autograd graph. `inputs`: of the model, besides `input_ids` (1, 8).
    """
    ids = torch.full((1, 8), 3)
    if model.config.is_encoder_decoder:
        # BART's head reads the state of the last </s>
        ids[0, -1] = model.config.eos_token_id
    training = model.training
    attention = model.config._attn_implementation
    # on a CPU flash and flex attention do not work
    if attention not in (None, "sdpa", "eager"):
        model.config._attn_implementation = "eager"
    model.eval()  # nothing is drawn, no layer is dropped, no running mean changes
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits
    model.train(training)
    model.config._attn_implementation = attention
    used = {id(leaf) for leaf in autograd_leaves(logits)}
    for parameter in model.parameters():
        if id(parameter) not in used:
            parameter.requires_grad_(False)


def load_saved_classifier(settings: ModelSettings) -> Any:
    """A fine-tuned classifier. Raises UserError if weights are missing."""
    name = str(settings.model_name_or_path)
    config = load_config(settings)
    model, loading = from_pretrained(AutoModelForSequenceClassification, name, config)
    prefix = f"{model.base_model_prefix}."
    refuse_random(name, (key for key in loading["missing_keys"] if key.startswith(prefix)))
    if loading["missing_keys"]:
        remedy = _other_head(loading) or (
            "Fine-tune it first, pass a run's model folder, or load it with the class of the recipe "
            "that changed the model"
        )
        raise UserError(
            f"{name} lacks {listing(sorted(loading['missing_keys']), 2)}: with no trained "
            f"classification head its predictions would be random. {remedy}"
        )
    configure_decoder(model.config, name)
    choose_attention(model, settings.attn_implementation)
    read_first_token_only(model)
    return model


def set_dropout(config: Any, probability: float | None) -> None:
    """Sets all dropout probabilities of a config, under any name; None changes nothing."""
    if probability is None:
        return
    for name, value in config.to_dict().items():
        is_dropout = "dropout" in name or name.endswith("pdrop")  # GPT-2's
        if is_dropout and type(value) in (int, float, type(None)):
            setattr(config, name, probability)
