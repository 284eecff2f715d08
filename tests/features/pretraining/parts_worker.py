"""recipes/pretrain.py with few logits at a time, as with a large vocabulary: ranks have different numbers of parts."""

import recipes.pretrain
from toolkit.features.pretraining import model


def main() -> None:
    model.MAX_LOGITS = 2000
    recipes.pretrain.main()
