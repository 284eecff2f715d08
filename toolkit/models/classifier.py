"""Any `AutoModelForSequenceClassification` checkpoint, the same weights in every process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils import set_seed  # transformers' own imports peft, which takes a second
from transformers import AutoModelForSequenceClassification, PreTrainedModel, masking_utils

from toolkit.config import ModelSettings, ProblemType
from toolkit.demo import model_path
from toolkit.errors import UserError, listing
from toolkit.models.exported import ExportedClassifier, exported_to
from toolkit.models.first_token import read_first_token_only
from toolkit.models.layers import freeze_layers, keep_layers, renew_layers
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


class Classes(Protocol):
    """The classes of a classifier, as those of the data have them."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def problem_type(self) -> ProblemType: ...


def load_classifier(settings: ModelSettings, labels: Classes, seed: int) -> Any:
    """The pretrained encoder with a head for these classes, in float32 on the CPU; with `lora_r`, a PeftModel.

    The weights of a new head and of LoRA depend on the seed only: every process makes the same ones, whatever the
    strategy, because nothing is sharded before `accelerator.prepare`.
    Raises UserError when the model cannot be loaded or an option does not fit it.
    """
    name, config = str(settings.model_name_or_path), load_config(settings)
    if config.is_encoder_decoder and config.model_type == "encoder-decoder":
        raise UserError(f"--model_name_or_path {name} writes titles: train it with recipes/title.py")
    config.problem_type = labels.problem_type
    config.id2label = dict(enumerate(labels.names))
    config.label2id = {label: index for index, label in enumerate(labels.names)}
    read_as_decoder(config, name)
    set_dropout(config, settings.dropout)
    attention = None if config.model_type == "big_bird" else settings.attn_implementation
    options: dict[str, Any] = {"dtype": torch.float32, **({"attn_implementation": attention} if attention else {})}
    set_seed(seed)
    with explain_load_errors(name, attention), whole_weights(), quiet_transformers():
        # a classification head of another size is replaced: that is what fine-tuning on new labels is
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            model_path(name),
            config=config,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    new = [*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])]
    # a head (and a pooler) may be new
    prefix = f"{model.base_model_prefix}."
    refuse_random(name, (key for key in new if key.startswith(prefix) and "pooler" not in key))
    if settings.num_hidden_layers:
        keep_layers(model, settings.num_hidden_layers, name)
    if settings.reinit_layers:
        renew_layers(model, settings.reinit_layers, name, seed)
    if settings.freeze_layers is not None:
        freeze_layers(model, settings.freeze_layers, name)
    choose_attention(model, settings.attn_implementation)
    if settings.gradient_checkpointing:
        recompute_activations(name, model)
    freeze_unused(model)
    read_first_token_only(model)
    if settings.lora_r:
        with whole_weights():
            model = add_lora(model, settings, new)
        freeze_unused(model)
    return model


def read_as_decoder(config: Any, name: str) -> None:
    """Sets what a decoder (Qwen3) needs to classify: a padding token, since its head reads the last other token, and no
    cache of keys and values, which only generation needs. An encoder's config has the one and ignores the other."""
    config = config.get_text_config()
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = load_plain_tokenizer(name).pad_token_id
    config.use_cache = False


@functools.cache
def trust_masks() -> None:
    """transformers tests whether a mask hides anything, and whether ids without a mask are padded, which synchronises
    the GPU in each forward pass. Our masks always hide something: a batch without padding has none."""
    for name in ("_ignore_bidirectional_mask_sdpa", "_ignore_causal_mask_sdpa"):
        check = require(masking_utils, name, "transformers")
        setattr(masking_utils, name, partial(_check_on_cpu, check))
    warn = require(PreTrainedModel, "warn_if_padding_and_no_attention_mask", "transformers")
    PreTrainedModel.warn_if_padding_and_no_attention_mask = lambda model, ids, mask: _check_on_cpu(
        partial(warn, model), ids, mask
    )


def _check_on_cpu(check: Callable[..., Any], tensor: torch.Tensor | None, *more: Any, **options: Any) -> Any:
    return (tensor is None or tensor.device.type == "cpu") and check(tensor, *more, **options)


def choose_attention(model: Any, attention: str | None) -> None:
    """Gives a BigBird encoder in `model` this attention; by default ours, exact and fast.

    `eager` is transformers' own. Other models are not changed. Raises UserError for a name that BigBird does not have.
    """
    trust_masks()
    config = encoder_config(model.config)
    if config.model_type != "big_bird":
        return
    from transformers import BigBirdModel

    from toolkit.models import bigbird

    sparse = config.attention_type == "block_sparse"
    if attention != "eager":
        bigbird.install(model, attention or ("auto" if sparse else "full"))
        return
    for part in model.modules():  # transformers' own becomes full attention for good at its first short batch
        if sparse and isinstance(part, BigBirdModel) and not part.config.is_decoder:
            part.register_forward_pre_hook(lambda encoder, _: encoder.set_attention_type("block_sparse"))


def recompute_activations(name: str, model: Any) -> None:
    """Raises UserError where the model has no code for it."""
    if not model.supports_gradient_checkpointing:
        raise UserError(f"{name} cannot recompute activations: leave --gradient_checkpointing out")
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})


def freeze_unused(model: torch.nn.Module, **more: Any) -> list[str]:
    """Freezes the trained parameters that no output depends on (an unused pooler), and returns their names.

    Data parallel training would stop at them, and sharded optimizers would decay them where one process does not
    change them. They are found in the graph of one short sample's logits, which costs a forward pass. `more`: inputs of
    the model besides `input_ids` (1, 8).
    """
    training, ones = model.training, torch.ones(1, 8, dtype=torch.long)
    with torch.random.fork_rng(devices=[]):
        logits = model.train()(input_ids=ones, attention_mask=ones, **more).logits
    model.train(training)
    nodes, queue = set(), [logits.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            queue += [function for function, _ in node.next_functions]
    leaves = {id(node.variable) for node in nodes if hasattr(node, "variable")}
    unused = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in leaves]
    for name in unused:
        model.get_parameter(name).requires_grad_(False)
    return unused


def load_saved_classifier(settings: ModelSettings) -> Any:
    """A fine-tuned classifier as it was saved, or as it was exported. Raises UserError for one whose head was never
    trained."""
    name = str(settings.model_name_or_path)
    config = load_config(settings)
    if exported_to(Path(name)):
        return ExportedClassifier(Path(name), config)
    with explain_load_errors(name), whole_weights(), quiet_transformers():
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            model_path(name), config=config, trust_remote_code=False, output_loading_info=True, dtype=torch.float32
        )
    if loading["missing_keys"]:
        raise UserError(
            f"{name} has no trained classification head ({listing(sorted(loading['missing_keys']), 2)} missing): "
            "its predictions would be noise; fine-tune it first, or name a run's model folder"
        )
    read_as_decoder(model.config, name)
    choose_attention(model, settings.attn_implementation)
    read_first_token_only(model)
    return model


def set_dropout(config: Any, probability: float | None) -> None:
    """Sets every dropout probability of a config, whatever the family calls it; None changes nothing."""
    if probability is None:
        return
    for name, value in config.to_dict().items():
        if "dropout" in name and (value is None or isinstance(value, float | int)) and not isinstance(value, bool):
            setattr(config, name, probability)
