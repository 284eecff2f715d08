"""Run by tests/features/titles/test_titles.py in a group of processes: checks that small sets get one title per text,
also if the ranks' titles have very different lengths.

    titles_worker.main: argument MODEL
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object

from toolkit import launch
from toolkit.config import PretrainedSettings, TrainingSettings
from toolkit.data.tokenizer import load_tokenizer
from toolkit.evaluation import Evaluation, Outputs
from toolkit.evaluation.outputs import BatchSizes
from toolkit.features.titles.data import TitleCollator, TitleSplit
from toolkit.features.titles.evaluation import Writer, title_evaluation, title_metrics
from toolkit.features.titles.model import load_title_model
from toolkit.features.titles.settings import GenerationSettings
from toolkit.models.to_bigbird import long_model
from toolkit.objective.losses import token_losses
from toolkit.training.optimizer import parameter_groups
from toolkit.training.prepare import prepare_for_strategy

SIZES, BATCH, LONGEST = (1, 2, 3, 7), 2, 9


def main() -> None:
    settings = PretrainedSettings(model_name_or_path=sys.argv[1])
    accelerator = launch.make_accelerator("no")
    training = TrainingSettings(
        global_batch_size=4, per_device_batch_size=2, per_device_eval_batch_size=BATCH
    )
    generation = GenerationSettings(num_beams=2)
    long = long_model(settings, None, accelerator)
    tokenizer = load_tokenizer(long)
    model: Any = load_title_model(settings, long, generation, tokenizer, LONGEST, seed=1)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=1e-4)
    model, optimizer = prepare_for_strategy(accelerator, training, 1, model, optimizer)

    def evaluate(split: TitleSplit) -> Evaluation:
        """As recipes/title.py."""
        outputs = Outputs(accelerator, split, tokenizer, BatchSizes(BATCH))
        writer = Writer(accelerator, model)
        for batch in outputs.batches(model):
            encoded, mask = writer.encode(batch)
            losses = token_losses(writer.logits(batch, encoded, mask), batch.labels)
            titles = writer.write(encoded, mask)
            outputs.add(accelerator.gather_for_metrics((batch.ids, losses, titles)))
        return title_evaluation(outputs, tokenizer, title_metrics)

    def lines_of(size: int) -> list[dict[str, Any]]:
        split = fake_split(size)
        evaluation = evaluate(split)
        assert evaluation.numbers["num_samples"] == size
        if evaluation.predictions is None:
            return []
        lines = list(evaluation.predictions())
        assert [line["id"] for line in lines] == split.rows.tolist(), size
        assert [line["reference"] for line in lines] == split.titles(), size
        return lines

    for size in SIZES:
        lines_of(size)
    if accelerator.num_processes > 1:
        _uneven_ends(accelerator, model, lambda: lines_of(7))
    if accelerator.is_main_process:
        print(f"sizes {SIZES}: every title exactly once", flush=True)


def _uneven_ends(accelerator: Any, model: Any, evaluate: Any) -> None:
    """On the main process titles end after one token, on the others never: all ranks must call the
    decoder equally often, as with sharded parameters each call is a collective."""
    writer = Writer(accelerator, model)
    module, config = writer.module, writer.module.generation_config
    if accelerator.is_main_process:
        config.exponential_decay_length_penalty = (0, 1000.0)
    else:
        config.suppress_tokens = [config.eos_token_id]
    calls = []
    hook = module.decoder.register_forward_hook(lambda *_: calls.append(1))
    lines = evaluate()
    hook.remove()
    counts = gather_object([len(calls)])
    assert len(set(counts)) == 1, counts
    if accelerator.is_main_process:
        words = [len(line["title"]) for line in lines]
        assert 4 * min(words) <= max(words)  # 1 and 9 tokens


class FakeSplit(TitleSplit):
    def titles(self) -> list[str]:
        return [f"title {row}" for row in range(len(self))]


def fake_split(size: int) -> TitleSplit:
    generator = np.random.default_rng(size)
    lengths = generator.integers(2, 17, size), generator.integers(3, 8, size)
    ids = [generator.integers(5, 40, each.sum()).astype(np.int32) for each in lengths]
    ends = [np.concatenate([[0], np.cumsum(each)]) for each in lengths]
    rows = np.arange(size) * 3 + 1
    return FakeSplit(
        "test",
        Path(),
        ids[0],
        ends[0],
        np.zeros(size, np.int64),
        rows,
        ids[1],
        ends[1],
        collator=TitleCollator,
    )
