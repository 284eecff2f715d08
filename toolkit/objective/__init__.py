"""The training objective: the losses of the labels, wrapped by optional terms.

objective = make_objective(settings, model, data)
losses = objective(batch, logits)                     # (B,), for training
losses = objective.losses(logits, batch.labels)       # (B,), of the labels only, for evaluation
objective = objective.plus(term)                      # adds your term(batch, logits), (B,)
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from toolkit.config import TaskSettings
from toolkit.errors import UserError
from toolkit.objective.adversarial import Adversarial
from toolkit.objective.losses import Losses, Objective, sample_losses
from toolkit.objective.r_drop import with_r_drop
from toolkit.utils.features import features
from toolkit.utils.log import log_on_rank_0
from toolkit.utils.modules import unwrapped


def make_objective(
    settings: TaskSettings, model: Any, data: Any, losses: Losses | None = None
) -> Objective:
    """The objective for classification or regression: `losses` of the labels (by default those of
    the settings), with the terms of features, R-Drop and FGM as in the settings.

    `model` is prepared; `data` has the labels and `pos_weight`. Terms are computed per sample, so
    they do not depend on micro-batches. Raises UserError for a term that does not fit the model or
    the labels.
    """
    problem_type = data.labels.problem_type
    terms = settings.objective
    smoothing = settings.training.label_smoothing_factor
    if losses is None:
        if smoothing and problem_type != "single_label_classification":
            kind = problem_type.replace("_", " ")
            raise UserError(
                f"--label_smoothing_factor {smoothing} has no effect with {kind}: leave it out"
            )
        losses = partial(
            sample_losses,
            problem_type=problem_type,
            label_smoothing=smoothing,
            focal_gamma=terms.gamma,
            pos_weight=data.pos_weight,
        )
    else:
        _log_replaced(settings)
    objective = Objective(losses)
    for feature in features():
        objective = feature.objective(settings, objective, data)
    if terms.r_drop_alpha:
        if not _has_dropout(model):
            log_on_rank_0(
                f"--r_drop_alpha {terms.r_drop_alpha}: no effect, since the model has no dropout"
            )
        objective = with_r_drop(objective, model, problem_type, terms.r_drop_alpha)
    if terms.fgm_epsilon:
        objective = replace(
            objective, training=Adversarial(objective, model, terms.fgm_epsilon)
        )
    return objective


def _log_replaced(settings: TaskSettings) -> None:
    """Names the settings that losses of the recipe's own do not see."""
    values = {
        "--label_smoothing_factor": settings.training.label_smoothing_factor,
        "--loss focal": settings.objective.gamma,
        "--pos_weight": settings.objective.pos_weight,
    }
    names = ", ".join(name for name, value in values.items() if value)
    if names:
        log_on_rank_0(f"{names}: no effect, unless the losses of the recipe apply them")


def _has_dropout(model: Any) -> bool:
    module = unwrapped(model)
    modules = module.modules()
    rates: list[Any] = [part.p for part in modules if isinstance(part, torch.nn.Dropout)]
    config = getattr(module, "config", None)
    for name in ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop"):
        rates.append(getattr(config, name, None))
    return any(rates)
