"""Loads classifiers: any `AutoModelForSequenceClassification` checkpoint, with equal weights in every process."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed  # transformers' own imports peft, which takes a second
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    masking_utils,
)

from toolkit.config import ModelSettings, PretrainedSettings
from toolkit.errors import UserError, listing
from toolkit.models.attention import install as install_attention
from toolkit.models.attention import share_casts
from toolkit.models.exported import ExportedClassifier, export_format
from toolkit.models.first_token import read_first_token_only
from toolkit.models.layers import freeze_layers, keep_layers, reinit_layers
from toolkit.models.lora import add_lora
from toolkit.pretrained import (
    encoder_config,
    explain_load_errors,
    load_config,
    load_plain_tokenizer,
    quiet_transformers,
    refuse_random,
    whole_weights,
)
from toolkit.utils.compat import require
from toolkit.utils.modules import autograd_leaves

_LAYER = re.compile(r"\blayers?\.(\d+)\.")


def load_classifier(settings: ModelSettings, labels: Any, seed: int) -> Any:
    """The pretrained encoder with a head for the `names` and the `problem_type` of the labels, in float32 on the CPU;
    with `lora_r`, a PeftModel.

    A new head and LoRA are initialized by the seed: equal in every process under every strategy, since nothing is
    sharded before `accelerator.prepare`. Raises UserError if the model cannot be loaded or an option does not fit.
    """
    name, config = str(settings.model_name_or_path), load_config(settings)
    if config.is_encoder_decoder and config.model_type == "encoder-decoder":
        raise UserError(f"model {name} is a title model: train it with recipes/title.py")
    before = [str(label) for _, label in sorted(config.id2label.items())]
    config.problem_type = labels.problem_type
    config.id2label = dict(enumerate(labels.names))
    config.label2id = {label: index for index, label in enumerate(labels.names)}
    configure_decoder(config, name)
    set_dropout(config, settings.dropout)
    set_seed(seed)
    # replaces a classification head of another size
    model, loading = from_pretrained(
        AutoModelForSequenceClassification,
        name,
        config,
        settings.attn_implementation,
        ignore_mismatched_sizes=True,
    )
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        raise UserError(
            f"model {name}: {type(model).__name__} would read padding as part of the text"
        )
    if before != list(labels.names) and set(before) == set(labels.names):
        _reorder_head(model, [before.index(label) for label in labels.names])
    new = [*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])]
    # only a head and a pooler may be new
    prefix = f"{model.base_model_prefix}."
    refuse_random(name, (key for key in new if key.startswith(prefix) and "pooler" not in key))
    if settings.num_hidden_layers:
        keep_layers(model, settings.num_hidden_layers, name)
    if settings.reinit_layers:
        reinit_layers(model, settings.reinit_layers, name, seed)
    if settings.freeze_layers is not None:
        freeze_layers(model, settings.freeze_layers, name, settings.reinit_layers or 0)
    configure(model, settings)
    read_first_token_only(model)
    if settings.lora_r:
        with whole_weights():
            model = add_lora(model, settings, new)
        freeze_unused(model)
    return model


def _reorder_head(model: Any, order: list[int]) -> None:
    """Reorders the outputs of a head that was trained on the same classes in another order."""
    modules = [
        part
        for name, part in model.named_modules()
        if not name.startswith(f"{model.base_model_prefix}.")
    ]
    heads = [part for part in modules if getattr(part, "out_features", None) == len(order)]
    if not heads:
        classes = f"the classes {listing(model.config.label2id)}, in an order other than the data's"
        raise UserError(
            f"{type(model).__name__} has {classes}, and no linear layer as its head: reorder its outputs"
        )
    for parameter in heads[-1].parameters():
        parameter.data = parameter.data[order]


def from_pretrained(
    auto_class: Any, name: str, config: Any, attention: str | None = None, **options: Any
) -> tuple[Any, Any]:
    """(a model with all of its weights, in float32 unless `dtype` is among the options, transformers' loading info).
    Raises UserError, also for weights of more layers than the config has, which transformers drops silently."""
    if attention and config.model_type != "big_bird":  # `choose_attention` installs a BigBird's
        options["attn_implementation"] = attention
    with (
        explain_load_errors(name, options.get("attn_implementation")) as path,
        whole_weights(),
        quiet_transformers(),
    ):
        options = {"dtype": torch.float32, "output_loading_info": True, **options}
        loaded: tuple[Any, Any] = auto_class.from_pretrained(
            path, config=config, trust_remote_code=False, **options
        )
    layers = getattr(config.get_text_config(), "num_hidden_layers", None) or math.inf
    unexpected = {key: _LAYER.search(key) for key in loaded[1]["unexpected_keys"]}
    refuse_random(
        name, (key for key, match in unexpected.items() if match and int(match[1]) >= layers)
    )
    return loaded


def configure_decoder(config: Any, name: str) -> None:
    """Makes a decoder (Qwen3) classify: sets its padding token to the tokenizer's, since the head reads each text's
    last token before padding, and switches off the key-value cache. Changes nothing for an encoder."""
    config = config.get_text_config()
    is_decoder = (
        type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        and type(config) not in MODEL_FOR_MASKED_LM_MAPPING
    )
    if is_decoder or getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = load_plain_tokenizer(name).pad_token_id
    config.use_cache = False


@functools.cache
def skip_mask_checks() -> None:
    """Skips transformers' checks of masks and padding on a GPU, which synchronise in each forward pass. They are not
    needed: our batches have a mask only with padding."""
    for name in ("_ignore_bidirectional_mask_sdpa", "_ignore_causal_mask_sdpa"):
        check = require(masking_utils, name, "transformers")
        setattr(masking_utils, name, partial(_check_on_cpu, check))
    warn = require(PreTrainedModel, "warn_if_padding_and_no_attention_mask", "transformers")
    PreTrainedModel.warn_if_padding_and_no_attention_mask = lambda model, ids, mask: _check_on_cpu(
        partial(warn, model), ids, mask
    )


def _check_on_cpu(
    check: Callable[..., Any], tensor: torch.Tensor | None, *args: Any, **options: Any
) -> Any:
    return (tensor is None or tensor.device.type == "cpu") and check(tensor, *args, **options)


def choose_attention(model: Any, attention: str | None) -> None:
    """Installs an attention in a BigBird encoder, by default the fast one; `eager` is transformers'. In other models
    only casts become fewer. Raises UserError for an unknown name."""
    skip_mask_checks()
    install_attention()
    share_casts(model)
    config = encoder_config(model.config)
    if config.model_type != "big_bird":
        return
    from transformers import BigBirdModel

    from toolkit.models import bigbird

    sparse = config.attention_type == "block_sparse"
    if attention != "eager":
        bigbird.install(model, attention or ("auto" if sparse else "full"))
        return
    for part in (
        model.modules()
    ):  # transformers' would switch to full attention for good at its first short batch
        if sparse and isinstance(part, BigBirdModel) and not part.config.is_decoder:
            part.register_forward_pre_hook(
                lambda encoder, _: encoder.set_attention_type("block_sparse")
            )


def configure(model: Any, settings: PretrainedSettings, **inputs: Any) -> None:
    """Installs the attention, turns gradient checkpointing on, and freezes unused parameters (`inputs`: see
    `freeze_unused`). Raises UserError if the model does not support it."""
    choose_attention(model, settings.attn_implementation)
    if settings.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UserError(
                f"{settings.model_name_or_path} does not support --gradient_checkpointing: leave it out"
            )
        enable = getattr(
            model, "activation_checkpointing_enable", None
        )  # transformers 5.18 has the old name only
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    freeze_unused(model, **inputs)


def freeze_unused(model: Any, **inputs: Any) -> list[str]:
    """Freezes trainable parameters that the logits do not depend on (an unused pooler), and returns their names.

    DDP raises for them, and sharded optimizers would decay them. Takes one forward pass of a short sample, and searches
    the autograd graph. `inputs`: of the model, besides `input_ids` (1, 8).
    """
    config, training, ids = model.config, model.training, torch.full((1, 8), 3)
    if config.is_encoder_decoder:
        ids[0, -1] = config.eos_token_id  # BART's head reads the state of the last </s>
    with cpu_attention(
        model
    ):  # in evaluation: nothing is drawn, no layer is dropped, no running mean changes
        logits = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits
    model.train(training)
    leaves = {id(leaf) for leaf in autograd_leaves(logits)}
    unused = [
        name
        for name, each in model.named_parameters()
        if each.requires_grad and id(each) not in leaves
    ]
    for name in unused:
        model.get_parameter(name).requires_grad_(False)
    return unused


@contextlib.contextmanager
def cpu_attention(model: Any) -> Iterator[None]:
    """Within this context an attention for GPUs only (`flash_attention_2`), or without a backward pass on a CPU
    (`flex_attention`), is replaced."""
    config, name = model.config, model.config._attn_implementation
    if name in (None, "sdpa", "eager"):
        yield
        return
    config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = name


def load_saved_classifier(settings: ModelSettings) -> Any:
    """A fine-tuned classifier, saved or exported. Raises UserError if weights are missing."""
    name = str(settings.model_name_or_path)
    config = load_config(settings)
    if export_format(Path(name)):
        return ExportedClassifier(Path(name), config)
    model, loading = from_pretrained(AutoModelForSequenceClassification, name, config)
    if missing := sorted(loading["missing_keys"]):
        what, remedy = (
            "trained classification head",
            "fine-tune it first, or pass a run's model folder",
        )
        if others := listing(sorted(loading["unexpected_keys"]), 2):
            remedy = f"a recipe that changed the model saved {others} instead: load it with that recipe's class"
        if all(key.startswith(f"{model.base_model_prefix}.") for key in missing):
            what, remedy = (
                "weights for its config.json",
                "a recipe that changes layers changes `model.config`, too",
            )
        raise UserError(
            f"{name} has no {what} ({listing(missing, 2)} missing): predictions would be random; {remedy}"
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
        if (
            is_dropout
            and (value is None or isinstance(value, float | int))
            and not isinstance(value, bool)
        ):
            setattr(config, name, probability)
