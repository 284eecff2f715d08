"""recipes/pretrain.py with the logits of a few masked tokens at a time, as a large vocabulary has them: one process may
have more parts than another."""

from __future__ import annotations

import recipes.pretrain
from toolkit.features.pretraining import model


def main() -> None:
    model.MOST_LOGITS = 2000
    recipes.pretrain.main()
