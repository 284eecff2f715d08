"""Generates a title for every text exactly once, and scores it against the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule

from toolkit.config import ModelSettings
from toolkit.data.batches import Batch
from toolkit.evaluation.answers import Answers
from toolkit.evaluation.outputs import BatchSizes, ComputeMetrics, Evaluation, Outputs
from toolkit.features.titles import rouge
from toolkit.features.titles.model import load_saved_title_model
from toolkit.features.titles.readable import readable
from toolkit.launch.precision import autocast
from toolkit.utils.modules import unwrapped

_DEFAULT = 33  # tokens, if generation_config.json sets no limit


def title_metrics(
    titles: Sequence[str],
    references: Sequence[str],
    segmenter: str = "auto",
) -> dict[str, Any]:
    """Mean ROUGE-1, 2 and L; `segmenter`: as `--rouge_segmenter`."""
    segmenter = rouge.resolve(segmenter, references)
    scores = rouge.scores(titles, references, segmenter)
    means = {
        name: float(np.mean([score[name] for score in scores])) for name in rouge.KINDS
    }
    return {**means, "rouge_segmenter": segmenter}


def title_evaluation(
    outputs: Outputs,
    tokenizer: Any,
    compute_metrics: ComputeMetrics,
) -> Evaluation:
    """The evaluation from gathered losses (N,), summed over each title's tokens, and generated
    token ids (N, T). All ranks get the metrics."""
    arrays = outputs.in_order()
    if not arrays:
        return outputs.make_evaluation()
    split: Any = outputs.split
    losses, generated = arrays
    titles = [readable(tokenizer, row) for row in generated.tolist()]
    references = split.titles()
    metrics = compute_metrics(titles, references)

    def lines() -> Iterator[dict[str, Any]]:
        scores = rouge.scores(titles, references, metrics.get("rouge_segmenter", "auto"))
        for row, title, reference, score in zip(
            split.rows.tolist(), titles, references, scores, strict=True
        ):
            yield {"id": row, "title": title, "reference": reference, "scores": score}

    return outputs.make_evaluation(losses, metrics, lines)


class TitleAnswers(Answers):
    """Titles by a saved encoder-decoder."""

    def load(self, settings: ModelSettings) -> Any:
        return load_saved_title_model(settings)

    def outputs(
        self,
        accelerator: Any,
        model: Any,
        split: Any,
        tokenizer: Any,
        *sizes: Any,
    ) -> list[str] | None:
        outputs = Outputs(accelerator, split, tokenizer, BatchSizes(*sizes))
        writer = Writer(accelerator, model)
        for batch in outputs.batches(model):
            titles = writer.write(writer.encode(batch))  # (B, T)
            outputs.add(accelerator.gather_for_metrics((batch.ids, titles)))
        arrays = outputs.in_order()
        if not arrays:
            return None
        return [readable(tokenizer, row) for row in arrays[0].tolist()]

    def answers(self, outputs: Sequence[str]) -> Iterator[dict[str, Any]]:
        return ({"prediction": title} for title in outputs)

    def metrics(self, outputs: Sequence[str], truth: Sequence[str]) -> dict[str, Any]:
        return title_metrics(outputs, truth)


class Writer:
    """Beam search with a prepared encoder-decoder on all ranks."""

    def __init__(self, accelerator: Accelerator, model: Any) -> None:
        model.eval()
        self.module = unwrapped(model)
        # of the encoder; the whole model's forward has its own
        self.autocast = autocast(accelerator)
        # a forward pass gathers sharded parameters: a rank whose titles have all ended must
        # continue until the others' have
        self.synced_gpus = accelerator.num_processes > 1
        config = self.module.generation_config
        self.max_new_tokens = config.max_new_tokens or (config.max_length or _DEFAULT) - 1
        if isinstance(self.module, FSDPModule):
            # its hooks gather root parameters only in the root's forward
            self.module._get_fsdp_state()._lazy_init()
            self.module.unshard()

    def encode(self, batch: Batch) -> dict[str, Any]:
        """The encoder's output and its attention mask (B, S), for both `logits` and `write`."""
        mask = batch.inputs["attention_mask"]
        with self.autocast:
            encoder = self.module.get_encoder()
            output = encoder(input_ids=batch.inputs["input_ids"], attention_mask=mask)
        return {"encoder_outputs": output, "attention_mask": mask}

    def logits(self, batch: Batch, encoded: dict[str, Any]) -> torch.Tensor:
        """(B, T, V): logits of the reference titles (teacher forcing)."""
        titles = batch.inputs["decoder_input_ids"]
        return self.module(**encoded, decoder_input_ids=titles, use_cache=False).logits

    def write(self, encoded: dict[str, Any]) -> torch.Tensor:
        """(B, max_new_tokens): ids of the generated titles, padded, without the start token."""
        ids = self.module.generate(
            **encoded,
            max_new_tokens=self.max_new_tokens,
            num_return_sequences=1,
            synced_gpus=self.synced_gpus,
        )[:, 1:]
        padding = (0, self.max_new_tokens - ids.shape[1])
        pad_token_id = self.module.generation_config.pad_token_id
        return torch.nn.functional.pad(ids, padding, value=pad_token_id)
