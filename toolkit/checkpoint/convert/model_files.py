"""What stands beside the weights: config, tokenizer, label names."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.convert.lora import CONFIG as ADAPTER_CONFIG
from toolkit.errors import UserError

CONFIG = "config.json"
TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# What a model folder may hold that is no weight; other files (logs, optimizer states) stay behind.
_KEPT = (
    "generation_config.json", "*token*.json", "vocab*", "merges.txt", "*.model", "spm*", "*.vocab", "*.py",
    "chat_template*", "*preprocessor_config.json", "processor_config.json", "*labels*",
    "config_sentence_transformers.json", "sentence_bert_config.json", "modules.json",
)  # fmt: skip


@dataclass(frozen=True)
class ModelFiles:
    """The files beside the weights."""

    folder: Path | None
    config: dict[str, Any] | None
    """config.json, where there is one."""
    copied: list[Path]

    @property
    def size(self) -> int:
        """Bytes, nearly."""
        return sum(path.stat().st_size for path in self.copied) + (8192 if self.config else 0)

    def write(self, folder: Path, dtype: str, is_adapter: bool) -> None:
        """`dtype`: of the weights, so that `from_pretrained` gives the model in it."""
        for path in self.copied:
            shutil.copyfile(path, folder / path.name)
        if is_adapter:
            assert self.folder is not None
            shutil.copyfile(self.folder / ADAPTER_CONFIG, folder / ADAPTER_CONFIG)
        elif self.config is not None:
            text = json.dumps(_with_dtype(self.config, TORCH_NAMES[dtype]), ensure_ascii=False, indent=2)
            (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    changed = {**config, "dtype": dtype}
    if "torch_dtype" in config:  # as transformers before 5 called it
        changed["torch_dtype"] = dtype
    return changed


def find(folder: Path | None, is_adapter: bool) -> ModelFiles:
    """Raises UserError when the folder has no config of a model that could be read."""
    if folder is None:
        return ModelFiles(None, None, [])
    config = None if is_adapter else read_config(folder)
    found = {path for pattern in _KEPT for path in folder.glob(pattern) if path.is_file()}
    names = (CONFIG, ADAPTER_CONFIG)
    copied = sorted(path for path in found if path.name not in names and not path.name.endswith(".index.json"))
    return ModelFiles(folder, config, copied)


def read_config(folder: Path) -> dict[str, Any]:
    """A model's config.json. Raises UserError when there is none, or it is of something else."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{folder} has no {CONFIG}: name a model's folder with --config_from") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error})") from None
    if not isinstance(config, dict) or not ("model_type" in config or "architectures" in config):
        inner = folder / "model"
        hint = f"; did you mean {inner}?" if (inner / CONFIG).is_file() else ""
        raise UserError(f"{path} is not the config of a model: it has no model_type{hint}")
    return config
