"""recipes/pretrain.py with few logits at a time, as with a large vocabulary: ranks have different numbers of parts."""

from unittest import mock

import recipes.pretrain
from toolkit.features.pretraining import model


def main() -> None:
    with mock.patch.object(model, "MAX_LOGITS", 2000):
        recipes.pretrain.main()
