"""Classifiers whose head reads the mean or the maximum of all tokens, where those of transformers read the first token.

A copy of this file lies in the folder of each such model, and transformers runs it when it is allowed to:

    AutoModelForSequenceClassification.from_pretrained(FOLDER, trust_remote_code=True)

Otherwise it refuses the folder, since `model_type` in its config.json is one that it does not have: by the class of the
family, whose parameters have the same names, the model would be read without an error and answer wrongly. This file
needs torch and transformers alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import transformers

# model_type -> what the names of its classes begin with. Their heads read `last_hidden_state[:, 0]`, or what the
# encoder's own pooler makes of it.
FAMILIES = {
    "albert": "Albert", "bert": "Bert", "big_bird": "BigBird", "camembert": "Camembert", "deberta": "Deberta",
    "deberta-v2": "DebertaV2", "distilbert": "DistilBert", "electra": "Electra", "ernie": "Ernie",
    "eurobert": "EuroBert", "gte": "Gte", "longformer": "Longformer", "modernbert": "ModernBert",
    "nomic_bert": "NomicBert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta",
}  # fmt: skip
PREFIX = "pooled-"
_CONFIG, _MODEL = "Config", "ForSequenceClassification"
_classified: ContextVar[Any] = ContextVar("_classified", default=None)
"""The encoder whose classifier runs in this thread. Whoever else calls an encoder gets every position."""


def pool(hidden: torch.Tensor, mask: torch.Tensor | None, pooling: str) -> torch.Tensor:
    """(B, S, H) and a mask (B, S), 0 at padding, or None where there is none -> (B, H), computed in float32."""
    states = hidden.float()
    hides = torch.zeros_like(states[:, :, :1], dtype=torch.bool) if mask is None else mask[:, :, None] == 0
    if pooling == "max":
        pooled = states.masked_fill(hides, float("-inf")).amax(dim=1)
    else:
        pooled = states.masked_fill(hides, 0).sum(dim=1) / (~hides).sum(dim=1).clamp(min=1)
    return pooled.to(hidden.dtype)


def _put_first(encoder: Any, _: Any, given: dict[str, Any], output: Any) -> Any:
    """What stands for the text becomes the one position of what the encoder answers its classifier."""
    if _classified.get() is not encoder:
        return output
    hidden = pool(output.last_hidden_state, given.get("attention_mask"), encoder.config.pooling)[:, None]  # (B, 1, H)
    output.last_hidden_state = hidden
    if hasattr(encoder, "pooler_activation"):  # ALBERT
        output.pooler_output = encoder.pooler_activation(encoder.pooler(hidden[:, 0]))
    elif output.get("pooler_output") is not None and encoder.config.model_type != "big_bird":  # whose head takes none
        output.pooler_output = encoder.pooler(hidden)
    return output


class _Config:
    """At run time it is of its family, as far as code asks for `model_type`; the file has the name of its own."""

    def __post_init__(self, **given: Any) -> None:
        super().__post_init__(**given)  # type: ignore[misc]
        own: Any = type(self)
        self.model_type = own.model_type.removeprefix(PREFIX)
        names = {"AutoConfig": own.__name__, f"AutoModel{_MODEL}": own.__name__.removesuffix(_CONFIG) + _MODEL}
        self.auto_map = {auto: f"{__name__.rpartition('.')[2]}.{name}" for auto, name in names.items()}


class _Model:
    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.base_model.register_forward_hook(_put_first, with_kwargs=True)  # type: ignore[attr-defined]


def _classify(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A classifier's forward, in which its encoder pools."""

    def pooled(self: Any, *args: Any, **options: Any) -> Any:
        token = _classified.set(self.base_model)
        try:
            return forward(self, *args, **options)
        finally:
            _classified.reset(token)

    # without `__wrapped__`, down to which accelerate's `unwrap_model(keep_fp32_wrapper=False)` strips a forward
    pooled.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return pooled


@functools.cache
def classes(family: str) -> tuple[Any, Any]:
    """The classes of config and model, made of those of transformers."""
    name = FAMILIES[family]
    bases = [getattr(transformers, name + end) for end in (_CONFIG, _MODEL)]
    config: Any = type(f"Pooled{name}{_CONFIG}", (_Config, bases[0]),
                       {"model_type": PREFIX + family, "__module__": __name__})  # fmt: skip
    config.register_for_auto_class()  # `save_pretrained` puts this file beside config.json
    values = {"config_class": config, "forward": _classify(bases[1].forward), "__module__": __name__}
    return config, type(f"Pooled{name}{_MODEL}", (_Model, bases[1]), values)


def know(model_type: Any) -> None:
    """Makes the Auto classes of transformers load models of this type, where it is one of ours."""
    family = str(model_type).removeprefix(PREFIX)
    if family in FAMILIES and family != model_type:
        config, model = classes(family)
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        transformers.AutoModelForSequenceClassification.register(config, model, exist_ok=True)


def pooled_config(config: Any, pooling: str) -> Any:
    """The config of the same model with `mean` or `max`; with `cls` that of transformers' own class."""
    family, given = config.model_type, config.to_dict()
    for name in ("model_type", "pooling", "auto_map"):
        given.pop(name, None)
    if pooling == "cls":
        own = FAMILIES[family]
        return getattr(transformers, own + _CONFIG)(**{**given, "architectures": [own + _MODEL]})
    know(PREFIX + family)
    return classes(family)[0](**given, pooling=pooling)


def __getattr__(name: str) -> Any:
    """`PooledBertConfig` and the like, made when they are asked for: 16 modules of transformers take seconds."""
    for family, start in FAMILIES.items():
        if name in (f"Pooled{start}{_CONFIG}", f"Pooled{start}{_MODEL}"):
            return classes(family)[name.endswith(_MODEL)]
    raise AttributeError(name)
