"""The training objective: the losses of the labels, wrapped by optional terms.

objective = make_objective(settings, model, data)
losses = objective(batch, logits)                     # (B,), for training
losses = objective.losses(logits, batch.labels)       # (B,), of the labels only, for evaluation
objective = objective.plus(term)                      # adds term(batch, logits), (B,), which you define
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate import PartialState

from toolkit.config import TaskSettings
from toolkit.errors import UserError
from toolkit.objective.adversarial import Adversarial
from toolkit.objective.losses import Losses, Objective, sample_losses
from toolkit.objective.second_targets import with_r_drop, with_teacher
from toolkit.pretrained import attention_dropout
from toolkit.utils.log import logger
from toolkit.utils.modules import unwrapped


def make_objective(
    settings: TaskSettings, model: Any, data: Any, losses: Losses | None = None
) -> Objective:
    """The objective for classification or regression: `losses` of the labels (by default those of the settings), plus
    a teacher, R-Drop and FGM as in the settings.

    `model` is prepared; `data` (`Prepared`) has the labels and `pos_weight`. Terms are computed per sample, so they do
    not depend on micro-batches. Raises UserError for a term that does not fit the model or the labels.
    """
    problem_type, terms = data.labels.problem_type, settings.objective
    smoothing, temperature = (
        settings.training.label_smoothing_factor,
        settings.distillation.distillation_temperature,
    )
    kind = problem_type.replace("_", " ")
    if smoothing and losses is None and problem_type != "single_label_classification":
        raise UserError(
            f"--label_smoothing_factor {smoothing} has no effect with {kind}: leave it out"
        )
    if temperature and problem_type == "regression":
        raise UserError(
            f"--distillation_temperature {temperature} has no effect with {kind}: leave it out"
        )
    needed = {
        "--label_smoothing_factor": smoothing,
        "--loss focal": terms.gamma,
        "--pos_weight": terms.pos_weight,
    }
    if (
        losses
        and (names := [name for name, value in needed.items() if value])
        and PartialState().is_main_process
    ):
        logger.info(f"{', '.join(names)}: no effect, unless the losses of the recipe apply them")
    options = {
        "label_smoothing": smoothing,
        "focal_gamma": terms.gamma,
        "pos_weight": data.pos_weight,
    }
    objective = Objective(losses or partial(sample_losses, problem_type=problem_type, **options))
    if settings.distillation.teacher:
        alpha = settings.distillation.distillation_alpha
        objective = with_teacher(objective, problem_type, alpha, temperature or 2.0)
    if terms.r_drop_alpha:
        if not _has_dropout(model) and PartialState().is_main_process:
            logger.info(
                f"--r_drop_alpha {terms.r_drop_alpha}: no effect, since a model without dropout draws nothing"
            )
        objective = with_r_drop(objective, model, problem_type, terms.r_drop_alpha)
    if terms.fgm_epsilon:
        objective = replace(objective, training=Adversarial(objective, model, terms.fgm_epsilon))
    return objective


def _has_dropout(model: Any) -> bool:
    plain = unwrapped(model)
    rates = (part.p for part in plain.modules() if isinstance(part, torch.nn.Dropout))
    return any(rates) or attention_dropout(getattr(plain, "config", None)) > 0
