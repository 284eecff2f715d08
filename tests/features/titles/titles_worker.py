"""recipes/title.py, run by tests/features/titles/test_titles.py on several processes, whose titles have very different
lengths: all ranks must call the decoder equally often, as with sharded parameters each call is a collective."""

from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from recipes import title
from toolkit.features.titles.evaluation import Writer

_write = Writer.write


def write_unevenly(writer: Writer, encoded: dict[str, Any]) -> torch.Tensor:
    """On the main process titles end after one token, on the others never."""
    config = writer.module.generation_config
    if PartialState().is_main_process:
        config.exponential_decay_length_penalty = (0, 1000.0)
    else:
        config.suppress_tokens = [config.eos_token_id]
    calls: list[int] = []
    hook = writer.module.decoder.register_forward_hook(lambda *_: calls.append(1))
    ids = _write(writer, encoded)
    hook.remove()
    config.exponential_decay_length_penalty = config.suppress_tokens = None
    counts = gather_object([len(calls)])
    assert len(set(counts)) == 1, counts
    return ids


def main() -> None:
    Writer.write = write_unevenly  # type: ignore[method-assign]
    try:
        title.main()
    finally:
        Writer.write = _write  # type: ignore[method-assign]
