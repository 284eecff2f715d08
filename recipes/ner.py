"""Fine-tune an encoder for token classification: it finds labelled spans (names, terms) in texts.

    python recipes/ner.py                                     the demo: names in English tweets
    python recipes/ner.py --train_file news.jsonl --model_name_or_path bert-base-chinese
    accelerate launch recipes/ner.py --config_file accelerate_configs/ddp.yaml
    python recipes/ner.py recipes/ner_zh_news.yaml            names in Chinese news

A row is {"text": "...", "entities": [{"start": 0, "end": 2, "label": "PER"}]}, or a sentence of
CoNLL columns. `--help` lists the settings; a YAML file of them may come first. To change the loss,
the metrics, the optimizer or the model, change this file; `toolkit verify THIS_FILE` then compares
the losses under every strategy.
"""

from pathlib import Path
from typing import Any

import toolkit
from toolkit import config, launch
from toolkit.features import spans
from toolkit.features.spans.settings import SpanSettings

# Settings of the demo, for runs without data and model settings.
DEMO = Path(__file__).with_name("ner_demo.yaml")


def main() -> None:
    settings = config.parse(SpanSettings, demo=DEMO, description=__doc__)
    training = settings.training
    run = toolkit.Run(settings)  # processes and precision, as the config file says
    accelerator = run.accelerator
    targets: Any = run.load_data().targets  # files -> windows of tokens, once per machine
    model = spans.load_tagger(settings.model, targets.labels, settings.data.stride, training.seed)
    optimizer = toolkit.make_optimizer(model, training)
    model, optimizer, scheduler = run.prepare(model, optimizer)  # copied or sharded

    def evaluate(split: toolkit.Split) -> toolkit.Evaluation:
        outputs = run.outputs(split)
        for batch in outputs.batches(model):  # each window once; no dropout, no gradients
            logits = model(**batch.inputs).logits.float()  # (B, S, C)
            losses = spans.word_losses(batch, logits)  # (B,)
            tags, probabilities = spans.predict_tags(batch, logits)  # (B, T), possible ones
            outputs.add(accelerator.gather_for_metrics((batch.ids, losses, tags, probabilities)))
        return spans.span_evaluation(outputs, targets.labels, spans.span_metrics)

    for step in run.steps(evaluate):  # resumes; logs, evaluates and saves when due
        for batch in step.micro_batches(model):  # this process's part of the global batch
            logits = model(**batch.inputs).logits  # (B, S, C)
            # (B,): each window's sum over the words that count in it
            losses = spans.word_losses(batch, logits, training.label_smoothing_factor)
            # their share of the mean over the words of the global batch
            accelerator.backward(step.mean(losses))
        step.grad_norm = accelerator.clip_grad_norm_(model.parameters(), training.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    run.finish(evaluate)  # the best model, on test rows if there are any


if __name__ == "__main__":
    launch.run(main)  # applies a --config_file given after the script
