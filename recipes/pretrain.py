"""Continue the pretraining of an encoder on your own texts, without labels (masked words).

    python recipes/pretrain.py                                the demo: English film reviews
    python recipes/pretrain.py --train_file texts.txt --model_name_or_path bert-base-chinese
    accelerate launch recipes/pretrain.py --config_file accelerate_configs/ddp.yaml

Pass its model/ to the other recipes as --model_name_or_path. `--help` lists the settings (such as
--whole_word_mask for Chinese); a YAML file of them may come first. To change the loss, the metrics,
the optimizer or the model, change this file.
"""

from pathlib import Path

import toolkit
from toolkit import config, launch
from toolkit.features import pretraining
from toolkit.features.pretraining.settings import PretrainSettings

# Settings of the demo, for runs without data and model settings.
DEMO = Path(__file__).with_name("pretrain_demo.yaml")


def main() -> None:
    settings = config.parse(PretrainSettings, demo=DEMO, description=__doc__)
    training = settings.training
    run = toolkit.Run(settings)  # processes and precision, as the config file says
    accelerator = run.accelerator
    run.load_data()  # files -> tokens, once per machine
    model = pretraining.load_masked_model(settings.model, training.seed)
    optimizer = toolkit.make_optimizer(model, training)
    model, optimizer, scheduler = run.prepare(model, optimizer)  # copied or sharded

    def evaluate(split: toolkit.Split) -> toolkit.Evaluation:
        outputs = run.outputs(split)
        for batch in outputs.batches(model):  # each text once, with fixed masks
            logits = model(**batch.inputs).logits  # (B, K, V), of the masked tokens
            sums = pretraining.masked_sums(logits, batch.labels)  # (B, 3)
            outputs.add(accelerator.gather_for_metrics((batch.ids, sums)))
        return pretraining.masked_evaluation(outputs, pretraining.masked_metrics)

    for step in run.steps(evaluate):  # resumes; logs, evaluates and saves when due
        for batch in step.micro_batches(model):  # this process's part of the global batch
            logits = model(**batch.inputs).logits  # (B, K, V), of the masked tokens
            # (B,): each text's sum
            losses = toolkit.token_losses(logits, batch.labels, training.label_smoothing_factor)
            # its share of the mean over the masked tokens of the global batch
            accelerator.backward(step.mean(losses))
        step.grad_norm = accelerator.clip_grad_norm_(model.parameters(), training.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    run.finish(evaluate)  # the best model, on test rows if there are any


if __name__ == "__main__":
    launch.run(main)  # applies a --config_file given after the script
