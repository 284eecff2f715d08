"""Losses of tags, and the most probable possible tags, without training anything."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.data.batches import Batch


def predict_tags(batch: Batch, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(B, S, C) logits -> (B, T) int32 tags and (B, T) float32 their probabilities, T the tokens of
    the split's longest window."""
    log_probabilities = logits.log_softmax(dim=-1)
    has_text = batch.columns["has_text"]
    width = logits.shape[1]
    tags = best_tags(log_probabilities, has_text[:, :width])
    chosen = log_probabilities.gather(2, tags[..., None])[..., 0]
    missing = (0, has_text.shape[1] - width)
    return F.pad(tags.int(), missing), F.pad(chosen.exp(), missing)


def word_losses(batch: Batch, logits: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """(B, S, C) logits -> (B,) float32 sums of cross entropies over the words of each window, of a
    word the mean over its tokens: a link of twenty pieces counts as much as a name of one."""
    losses = F.cross_entropy(
        logits.float().flatten(0, 1),
        batch.labels.flatten(),
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return (losses.view(batch.labels.shape) / batch.columns["pieces"]).sum(dim=1)


def best_tags(scores: Tensor, has_text: Tensor) -> Tensor:
    """(B, S, C) log probabilities of O, B-1, I-1, B-2, ... -> (B, S) the tags with the highest sum
    in which an I follows only its B or I (Viterbi, 1967). Tokens without text, has_text (B, S), are
    passed over."""
    rows, tokens, count = scores.shape
    place = torch.arange(count, device=scores.device)
    begins, insides = place[1::2], place[2::2]
    best = scores.new_full((rows, count), -torch.inf)
    best[:, 0] = 0  # as after O
    sources = []
    for token in range(tokens):
        value, source = best.max(dim=1, keepdim=True)
        values, source = value.repeat(1, count), source.repeat(1, count)
        values[:, insides] = torch.maximum(best[:, begins], best[:, insides])
        from_begin = best[:, begins] >= best[:, insides]
        source[:, insides] = torch.where(from_begin, begins, insides)
        counts = has_text[:, token, None]
        best = torch.where(counts, values + scores[:, token], best)
        sources.append(torch.where(counts, source, place))
    tag = best.argmax(dim=1, keepdim=True)
    tags = []
    for source in reversed(sources):
        tags.append(tag)
        tag = source.gather(1, tag)
    return torch.cat(tags[::-1], dim=1)
