"""Fine-tuning of BERT-like encoders, with the same result on any number of GPUs and machines.

`import toolkit` offers what a recipe, a script or a notebook needs (docs/api.md); __init__.pyi names
it, for editors too. Each name is imported on first use."""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
