"""Fine-tune a BigBird encoder with a decoder to write the titles of long texts.

    python recipes/title.py                                   the demo: titles of English news
    python recipes/title.py recipes/title_zh_news.yaml        titles of Chinese news
    python recipes/title.py --train_file articles.csv --model_name_or_path bert-base-chinese --max_length 4096
    accelerate launch recipes/title.py --config_file accelerate_configs/ddp.yaml

`--help` lists the settings; a YAML file of them may come first. To change the loss, the metrics, the optimizer or
the model, change this file; `toolkit verify THIS_FILE` then compares the losses under every strategy.
"""

from toolkit import launch

launch.start(__name__)  # applies a --config_file after the script, before the slow imports below

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import toolkit
from toolkit import config
from toolkit.features.titles.evaluation import Writer, title_evaluation, title_metrics
from toolkit.features.titles.model import load_title_model
from toolkit.features.titles.settings import TitleSettings

# Settings of the demo, for runs without data and model settings.
DEMO = Path(__file__).with_name("title_demo.yaml")


def main() -> None:
    settings = config.parse(TitleSettings, demo=DEMO, description=__doc__)
    training, generation, longest = (
        settings.training,
        settings.generation,
        settings.data.max_target_length,
    )
    accelerator = toolkit.start_accelerator(settings)
    pretrained = toolkit.long_model(
        settings.model, settings.data.max_length, accelerator
    )  # positions for all tokens
    tokenizer, data = toolkit.load_data(
        settings, accelerator, pretrained
    )  # texts and titles, once per machine

    # Equal weights in every process, then sharded or copied to devices by the strategy
    model = load_title_model(
        settings.model, pretrained, generation, tokenizer, longest, training.seed
    )
    optimizer = toolkit.make_optimizer(model, training)
    model, optimizer, scheduler, steps = toolkit.prepare(
        accelerator, training, model, optimizer, data.train, tokenizer
    )

    def loss_fn(
        logits: torch.Tensor, truth: torch.Tensor
    ) -> torch.Tensor:  # (B, T, V), (B, T) -> (B,)
        return toolkit.token_losses(
            logits, truth, training.label_smoothing_factor
        )  # sums over each title's tokens

    def compute_metrics(titles: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
        return title_metrics(titles, references, generation.rouge_segmenter)

    @torch.no_grad()
    def evaluate(split: toolkit.Split) -> toolkit.Evaluation:
        model.eval()
        writer, outputs = (
            Writer(accelerator, model),
            toolkit.Outputs(accelerator, split),
        )  # each sample exactly once
        for batch in toolkit.evaluation_batches(accelerator, split, tokenizer, steps.settings):
            encoded, mask = writer.encode(
                batch
            )  # encodes the texts once, for the loss and the search
            losses = loss_fn(writer.logits(batch, encoded, mask), batch.labels)  # (B,)
            titles = writer.write(encoded, mask)  # (B, T)
            outputs.add(accelerator.gather_for_metrics(batch.padded(losses, titles)))
        return title_evaluation(outputs, tokenizer, compute_metrics)

    # Train: each step is one global batch, and its loss the mean over the tokens of all its titles
    run = toolkit.Run(
        accelerator, settings, data, tokenizer, steps, compute_metrics, recipe="title"
    )
    run.resume(
        model, optimizer, scheduler, evaluate
    )  # from the newest checkpoint of this run, if any
    for step in run.steps():
        model.train()
        for batch in step.micro_batches(
            model
        ):  # this process's; gradients are synchronised in the last one
            losses = loss_fn(model(**batch.inputs, use_cache=False).logits, batch.labels)  # (B,)
            accelerator.backward(step.mean(losses))  # its share of the mean over the global batch
        grad_norm = accelerator.clip_grad_norm_(
            model.parameters(), training.max_grad_norm or math.inf
        )
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.after(
            step, grad_norm, evaluate
        )  # logs, evaluates, saves the best model and checkpoints, when due
    run.finish(evaluate)  # evaluates the best model, on test rows if there are any


if __name__ == "__main__":
    launch.run(main)
