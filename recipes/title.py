"""Fine-tune a BigBird encoder with a decoder to write the titles of long texts.

    python recipes/title.py                                   the demo: titles of English news
    python recipes/title.py recipes/title_zh_news.yaml        titles of Chinese news
    python recipes/title.py --train_file news.csv --model_name_or_path bert-base-chinese
    accelerate launch recipes/title.py --config_file accelerate_configs/ddp.yaml

`--help` lists the settings; a YAML file of them may come first. To change the loss, the metrics,
the optimizer or the model, change this file; `toolkit verify THIS_FILE` then compares the losses
under every strategy.
"""

from functools import partial
from pathlib import Path

import toolkit
from toolkit import config, launch
from toolkit.features import titles
from toolkit.features.titles.settings import TitleSettings

# Settings of the demo, for runs without data and model settings.
DEMO = Path(__file__).with_name("title_demo.yaml")


def main() -> None:
    settings = config.parse(TitleSettings, demo=DEMO, description=__doc__)
    training = settings.training
    run = toolkit.Run(settings)  # processes and precision, as the config file says
    accelerator = run.accelerator
    # with positions for all tokens
    pretrained = toolkit.long_model(settings.model, settings.data.max_length, accelerator)
    run.load_data(pretrained)  # files -> texts and titles -> tokens, once per machine
    model = titles.load_title_model(
        settings.model,
        pretrained,
        settings.generation,
        run.tokenizer,
        settings.data.max_target_length,
        training.seed,
    )
    optimizer = toolkit.make_optimizer(model, training)
    model, optimizer, scheduler = run.prepare(model, optimizer)  # copied or sharded
    # (B, T, V), (B, T) -> (B,): sums over each title's tokens
    losses_of = partial(toolkit.token_losses, label_smoothing=training.label_smoothing_factor)

    def evaluate(split: toolkit.Split) -> toolkit.Evaluation:
        outputs = run.outputs(split)
        writer = titles.Writer(accelerator, model)
        for batch in outputs.batches(model):  # each text once; no dropout, no gradients
            encoded = writer.encode(batch)  # once, for the loss and the search
            losses = losses_of(writer.logits(batch, encoded), batch.labels)  # (B,)
            written = writer.write(encoded)  # (B, T)
            outputs.add(accelerator.gather_for_metrics((batch.ids, losses, written)))
        segmenter = settings.generation.rouge_segmenter
        compute_metrics = partial(titles.title_metrics, segmenter=segmenter)
        return titles.title_evaluation(outputs, run.tokenizer, compute_metrics)

    for step in run.steps(evaluate):  # resumes; logs, evaluates and saves when due
        for batch in step.micro_batches(model):  # this process's part of the global batch
            losses = losses_of(model(**batch.inputs, use_cache=False).logits, batch.labels)  # (B,)
            # their share of the mean over the tokens of all titles of the global batch
            accelerator.backward(step.mean(losses))
        step.grad_norm = accelerator.clip_grad_norm_(model.parameters(), training.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    run.finish(evaluate)  # the best model, on test rows if there are any


if __name__ == "__main__":
    launch.run(main)  # applies a --config_file given after the script
