"""Fine-tune an encoder to classify texts, or to grade them with a number.

    python recipes/cls.py                                     the demo: English film reviews
    python recipes/cls.py --train_file reviews.csv --model_name_or_path bert-base-chinese
    accelerate launch recipes/cls.py --config_file accelerate_configs/ddp.yaml
    accelerate launch recipes/cls.py recipes/cls_zh_reviews.yaml --config_file accelerate_configs/ddp.yaml

`--help` lists the settings; a YAML file of them may come first. To change the loss, the metrics, the optimizer or
the model, change this file; `toolkit verify THIS_FILE` then compares the losses under every strategy.
"""

from toolkit import launch

launch.start(__name__)  # a --config_file behind the script is followed before the imports below take seconds

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit import config
from toolkit.data.prepare import prepare_data
from toolkit.data.tokens import Split, load_tokenizer
from toolkit.evaluation import (
    Evaluation,
    Outputs,
    classification_evaluation,
    classification_metrics,
    evaluation_batches,
)
from toolkit.evaluation.teacher import distilled, with_teacher
from toolkit.models.classifier import load_classifier
from toolkit.objective.losses import sample_losses
from toolkit.objective.regularize import Regularizer
from toolkit.pretrained import layer_of, load_config
from toolkit.run import Run
from toolkit.training.estimate import fit_batch_size
from toolkit.training.optimizer import make_optimizer, make_scheduler
from toolkit.training.resume import precision_of
from toolkit.training.steps import Steps
from toolkit.training.strategy import align_strategy

# What runs when neither data nor a model is named.
DEMO = Path(__file__).with_name("cls_demo.yaml")


def main() -> None:
    settings = config.parse(config.TaskSettings, demo=DEMO, description=__doc__)
    training = settings.training
    accelerator = launch.make_accelerator(precision_of(training), layer_of(settings.model))

    # Data: files -> columns -> tokens, made once per machine
    tokenizer = load_tokenizer(settings.model)
    data = prepare_data(settings, tokenizer, load_config(settings.model), accelerator)
    data = with_teacher(accelerator, settings, data, tokenizer)  # --teacher: what it says of each training row
    tokenizer.model_max_length = data.max_length  # saved with the model: it is to cut texts as they were cut here
    labels = data.labels

    # Model and optimizer: the same weights in every process, then placed as the launch asks
    model = load_classifier(settings.model, labels, training.seed)
    optimizer = make_optimizer(model, training)
    training = fit_batch_size(accelerator, model, data.train, tokenizer, training)  # --per_device_batch_size auto
    steps = Steps(accelerator, data.train, tokenizer, training)
    align_strategy(accelerator, model, optimizer, training, steps.schedule)
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = make_scheduler(optimizer, training, steps.schedule.total_steps)

    def loss_fn(logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:  # (B, C), (B,) or (B, C) -> (B,)
        smoothing, gamma = training.label_smoothing_factor, settings.objective.gamma
        return sample_losses(logits, truth, labels.problem_type, smoothing, gamma, data.pos_weight)

    def compute_metrics(logits: np.ndarray, truth: np.ndarray) -> dict[str, Any]:  # (N, C), (N,) or (N, C)
        return classification_metrics(logits, truth, labels)

    @torch.no_grad()
    def evaluate(split: Split) -> Evaluation:
        model.eval()
        outputs = Outputs(accelerator, split)  # each sample exactly once
        for batch in evaluation_batches(accelerator, split, tokenizer, training):
            logits = model(**batch.inputs).logits.float()  # (B, C)
            losses = loss_fn(logits, batch.labels)  # (B,)
            outputs.add(accelerator.gather_for_metrics(batch.padded(logits, losses)))
        return classification_evaluation(outputs, labels, compute_metrics)

    # Train: each step is one global batch, however many processes compute it
    regularize = Regularizer(model, loss_fn, settings.objective, labels.problem_type)
    run = Run(accelerator, settings, data, tokenizer, steps, compute_metrics, recipe="cls")
    run.resume(model, optimizer, scheduler, evaluate)  # at the newest checkpoint of this run, where there is one
    for step in run.steps():
        model.train()
        for batch in step.micro_batches(model):  # this process's; gradients are synchronised in the last one
            logits = model(**batch.inputs).logits  # (B, C)
            losses = distilled(loss_fn(logits, batch.labels), logits, batch, labels, settings)  # (B,)
            losses = regularize(batch, logits, losses)  # --r_drop_alpha, --fgm_epsilon
            accelerator.backward(step.mean(losses))  # its part of the mean over the global batch
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), training.max_grad_norm or math.inf)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.after(step, grad_norm, evaluate)  # logs, evaluates, saves the best model and checkpoints: each where due
    run.finish(evaluate)  # the best model, on the test rows where there are any


if __name__ == "__main__":
    launch.run(main)
