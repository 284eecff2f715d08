"""Titles of every text exactly once, and how they compare with those people wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list

from toolkit.config import GenerationSettings, TrainingSettings
from toolkit.data.batches import Batch, Collator, collator_of
from toolkit.data.readable import readable
from toolkit.data.tokens import Split, TitleSplit
from toolkit.evaluation import Evaluation, rouge
from toolkit.evaluation.predict import each_once, refuse_non_finite
from toolkit.models.loss import token_losses

_USUAL_LENGTH = 33  # of a model that was saved elsewhere and does not say


def evaluate_titles(
    accelerator: Accelerator,
    model: Any,
    split: Split,
    tokenizer: Any,
    generation: GenerationSettings,
    training: TrainingSettings,
) -> Evaluation:
    """The loss of the true titles and ROUGE of the written ones; every process gets the numbers.

    `model` is a prepared encoder-decoder whose `generation_config` says how long a title may be.
    """
    assert isinstance(split, TitleSplit)
    collate = collator_of(split, tokenizer, accelerator.device)
    batch_size = training.per_device_eval_batch_size or 2 * training.per_device_batch_size
    writer = Writer(accelerator, model)

    def outputs(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        decoder_input_ids = batch.inputs["decoder_input_ids"]
        encoded, mask = writer.encode(batch)
        logits = writer.module(
            encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=decoder_input_ids, use_cache=False
        ).logits  # (B, T, V)
        return token_losses(logits, batch.labels), writer.write(encoded, mask)

    found = each_once(accelerator, split, collate, batch_size, training.max_tokens_per_batch, outputs)
    ids, losses, written = found or (np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros((0, 1), np.int64))
    refuse_non_finite(accelerator, ids, losses[:, None], split)
    numbers, lines = _judge(ids, losses, written, split, tokenizer, generation) if found else ({}, None)
    return Evaluation(split.name, broadcast_object_list([numbers])[0], lines)


def generate_titles(
    accelerator: Accelerator,
    model: Any,
    split: Split,
    tokenizer: Any,
    per_device_batch_size: int,
    max_tokens: int | None = None,
) -> list[str] | None:
    """A title for every text of a split without titles, in its order, on the main process; all must call it."""
    writer = Writer(accelerator, model)

    def outputs(batch: Batch) -> tuple[torch.Tensor]:
        return (writer.write(*writer.encode(batch)),)

    collate = Collator(split, tokenizer, accelerator.device)
    found = each_once(accelerator, split, collate, per_device_batch_size, max_tokens, outputs)
    return [readable(tokenizer, row) for row in found[1].tolist()] if found else None


class Writer:
    """Beam search with a prepared encoder-decoder, in step with the other processes."""

    def __init__(self, accelerator: Accelerator, model: Any) -> None:
        model.eval()
        self.module = accelerator.unwrap_model(model)
        saved = self.module.generation_config
        self.most = saved.max_new_tokens or (saved.max_length or _USUAL_LENGTH) - 1
        self.padding = saved.pad_token_id or 0
        plugin = accelerator.state.deepspeed_plugin
        divided = accelerator.distributed_type == DistributedType.FSDP or (plugin and plugin.zero_stage == 3)
        # a process whose titles have all ended goes on until the others' have: each call gathers the parameters
        self.synced = bool(divided) and accelerator.num_processes > 1

    def encode(self, batch: Batch) -> tuple[Any, torch.Tensor]:
        """(the encoder's output, its mask (B, S)): the texts are read once for the loss and for the search."""
        input_ids = batch.inputs["input_ids"]  # (B, S)
        mask = batch.inputs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        return self.module.get_encoder()(input_ids=input_ids, attention_mask=mask), mask

    def write(self, encoded: Any, mask: torch.Tensor) -> torch.Tensor:
        """(B, most) ids, padded, without the token that begins a title."""
        found = self.module.generate(
            encoder_outputs=encoded, attention_mask=mask, max_new_tokens=self.most, synced_gpus=self.synced
        )[:, 1:]
        return torch.nn.functional.pad(found, (0, self.most - found.shape[1]), value=self.padding)


def _judge(
    ids: np.ndarray,
    losses: np.ndarray,
    written: np.ndarray,
    split: TitleSplit,
    tokenizer: Any,
    generation: GenerationSettings,
) -> tuple[dict[str, Any], Callable[[], Iterator[dict[str, Any]]]]:
    """(the numbers of eval.jsonl, what makes the lines of predictions.jsonl); `losses` are sums over each title's
    tokens."""
    titles, references = [readable(tokenizer, row) for row in written.tolist()], split.titles()
    segmenter = rouge.resolve(generation.rouge_segmenter, references)
    scores = rouge.scores(titles, references, segmenter)
    numbers: dict[str, Any] = {
        "num_samples": len(ids),
        "loss": float(losses.sum(dtype=np.float64) / split.loss_denominators.sum()),
        **{name: float(np.mean([score[name] for score in scores])) for name in scores[0]},
        "rouge_segmenter": segmenter,
    }

    def lines() -> Iterator[dict[str, Any]]:
        for row, title, reference, score in zip(ids, titles, references, scores, strict=True):
            rounded = {name: round(value, 6) for name, value in score.items()}
            yield {"id": int(row), "title": title, "reference": reference, "scores": rounded}

    return numbers, lines
