"""Continue the pretraining of an encoder on your own texts, without labels: masked-language modelling.

    python recipes/pretrain.py                                the demo: English film reviews
    python recipes/pretrain.py --train_file texts.txt --model_name_or_path bert-base-chinese --whole_word_mask true
    accelerate launch recipes/pretrain.py --config_file accelerate_configs/ddp.yaml

Pass its model/ to the other recipes as --model_name_or_path. `--help` lists the settings; a YAML file of them may
come first. To change the loss, the metrics, the optimizer or the model, change this file.
"""

from toolkit import launch

launch.start(__name__)  # applies a --config_file after the script, before the slow imports below

import math
from pathlib import Path

import torch
import torch.nn.functional as F

import toolkit
from toolkit import config
from toolkit.features.pretraining.data import masked_evaluation, masked_metrics
from toolkit.features.pretraining.model import load_masked_model
from toolkit.features.pretraining.settings import PretrainSettings

# Settings of the demo, for runs without data and model settings.
DEMO = Path(__file__).with_name("pretrain_demo.yaml")


def main() -> None:
    settings = config.parse(PretrainSettings, demo=DEMO, description=__doc__)
    training = settings.training
    accelerator = toolkit.start_accelerator(settings)
    tokenizer, data = toolkit.load_data(settings, accelerator)  # files -> tokens, once per machine

    def loss_fn(
        logits: torch.Tensor, truth: torch.Tensor
    ) -> torch.Tensor:  # (N, V), (N,) -> (N,), of some tokens
        return F.cross_entropy(logits.float(), truth, reduction="none")  # 0 for padding

    # Equal weights in every process, then sharded or copied to devices by the strategy
    model = load_masked_model(settings.model, tokenizer, loss_fn, training.seed)
    optimizer = toolkit.make_optimizer(model, training)
    model, optimizer, scheduler, steps = toolkit.prepare(
        accelerator, training, model, optimizer, data.train, tokenizer
    )

    @torch.no_grad()
    def evaluate(split: toolkit.Split) -> toolkit.Evaluation:
        model.eval()
        outputs = toolkit.Outputs(accelerator, split)  # each sample exactly once, with fixed masks
        for batch in toolkit.evaluation_batches(accelerator, split, tokenizer, steps.settings):
            sums = model(**batch.inputs).logits.sum(
                dim=1
            )  # (B, 2): losses and correct tokens of each text
            outputs.add(accelerator.gather_for_metrics(batch.padded(sums)))
        return masked_evaluation(outputs, masked_metrics)

    # Train: each step is one global batch, and its loss the mean over the masked tokens of all its texts
    run = toolkit.Run(
        accelerator, settings, data, tokenizer, steps, masked_metrics, recipe="pretrain"
    )
    run.resume(
        model, optimizer, scheduler, evaluate
    )  # from the newest checkpoint of this run, if any
    for step in run.steps():
        model.train()
        for batch in step.micro_batches(
            model
        ):  # this process's; gradients are synchronised in the last one
            losses = (
                model(**batch.inputs).logits[..., 0].sum(dim=1)
            )  # (B,): sums over each text's masked tokens
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
