"""Fine-tune a BigBird encoder with a decoder to write the titles of long texts.

    python recipes/title.py                                   the demo: titles of English news
    python recipes/title.py recipes/title_zh_news.yaml        titles of Chinese news
    python recipes/title.py --train_file articles.csv --model_name_or_path bert-base-chinese --max_length 4096
    accelerate launch recipes/title.py --config_file accelerate_configs/ddp.yaml

`--help` lists the settings; a YAML file of them may come first. To change the loss, the metrics, the optimizer or
the model, change this file; `toolkit verify THIS_FILE` then compares the losses under every strategy.
"""

from toolkit import launch

launch.start(__name__)  # a --config_file behind the script is followed before the imports below take seconds

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit import config
from toolkit.data.prepare import prepare_data
from toolkit.data.tokens import Split, load_tokenizer
from toolkit.evaluation import Evaluation, Outputs, evaluation_batches
from toolkit.features.titles.evaluation import Writer, title_evaluation, title_metrics
from toolkit.features.titles.model import load_title_model
from toolkit.features.titles.settings import TitleSettings
from toolkit.models.to_bigbird import long_model
from toolkit.objective.losses import token_losses
from toolkit.pretrained import layer_of, load_config
from toolkit.run import Run
from toolkit.training.estimate import fit_batch_size
from toolkit.training.optimizer import make_optimizer, make_scheduler
from toolkit.training.resume import precision_of
from toolkit.training.steps import Steps
from toolkit.training.strategy import align_strategy

# What runs when neither data nor a model is named.
DEMO = Path(__file__).with_name("title_demo.yaml")


def main() -> None:
    settings = config.parse(TitleSettings, demo=DEMO, description=__doc__)
    training, generation, longest = settings.training, settings.generation, settings.data.max_target_length
    accelerator = launch.make_accelerator(precision_of(training), layer_of(settings.model))

    # An encoder with as many positions as the texts need, then texts and titles, each made once per machine
    pretrained = long_model(settings.model, settings.data.max_length, accelerator)
    tokenizer = load_tokenizer(pretrained)
    data = prepare_data(settings, tokenizer, load_config(pretrained), accelerator)
    tokenizer.model_max_length = data.max_length  # saved with the model: it is to cut texts as they were cut here

    # Model and optimizer: the same weights in every process, then placed as the launch asks
    model = load_title_model(settings.model, pretrained, generation, tokenizer, longest, training.seed)
    optimizer = make_optimizer(model, training)
    training = fit_batch_size(accelerator, model, data.train, tokenizer, training)  # --per_device_batch_size auto
    steps = Steps(accelerator, data.train, tokenizer, training)
    align_strategy(accelerator, model, optimizer, training, steps.schedule)
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = make_scheduler(optimizer, training, steps.schedule.total_steps)

    def loss_fn(logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:  # (B, T, V), (B, T) -> (B,)
        return token_losses(logits, truth, training.label_smoothing_factor)  # sums over each title's tokens

    def compute_metrics(titles: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
        return title_metrics(titles, references, generation.rouge_segmenter)

    @torch.no_grad()
    def evaluate(split: Split) -> Evaluation:
        model.eval()
        writer, outputs = Writer(accelerator, model), Outputs(accelerator, split)  # each sample exactly once
        for batch in evaluation_batches(accelerator, split, tokenizer, training):
            with accelerator.autocast():
                encoded, mask = writer.encode(batch)  # the texts are read once for the loss and for the search
                losses = loss_fn(writer.logits(batch, encoded, mask), batch.labels)  # (B,)
                titles = writer.write(encoded, mask)  # (B, T)
            outputs.add(accelerator.gather_for_metrics(batch.padded(losses, titles)))
        return title_evaluation(outputs, tokenizer, compute_metrics)

    # Train: each step is one global batch, and its loss the mean over the tokens of all its titles
    run = Run(accelerator, settings, data, tokenizer, steps, compute_metrics, recipe="title")
    run.resume(model, optimizer, scheduler, evaluate)  # at the newest checkpoint of this run, where there is one
    for step in run.steps():
        model.train()
        for batch in step.micro_batches(model):  # this process's; gradients are synchronised in the last one
            losses = loss_fn(model(**batch.inputs, use_cache=False).logits, batch.labels)  # (B,)
            accelerator.backward(step.mean(losses))  # its part of the mean over the global batch
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), training.max_grad_norm or math.inf)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.after(step, grad_norm, evaluate)  # logs, evaluates, saves the best model and checkpoints: each where due
    run.finish(evaluate)  # the best model, on the test rows where there are any


if __name__ == "__main__":
    launch.run(main)
