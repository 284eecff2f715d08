"""BigBird's sparse attention (Zaheer et al. 2020, arXiv:2007.14062), exact and fast, on any BigBird of transformers.

    from transformers import AutoModelForSequenceClassification
    from toolkit.models import bigbird

    model = bigbird.install(AutoModelForSequenceClassification.from_pretrained("some-bigbird"))

The numbers are those of transformers' block_sparse attention, in training and evaluation, random plan included; the
dense [S, S] weights, which it builds and throws away on each forward, are not built, and numpy's generator is left
alone. A batch too short for the pattern (704 tokens or fewer at block 64 and 3 random blocks) runs full attention, and
later ones run sparse again. `save_pretrained` writes an ordinary BigBird.
"""

from toolkit.models.bigbird.install import install, uninstall
from toolkit.models.bigbird.modules import ATTENTIONS

__all__ = ["ATTENTIONS", "install", "uninstall"]
