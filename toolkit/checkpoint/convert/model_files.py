"""What stands beside the weights (config, tokenizer, label names), and whether the weights are those of the config."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.convert.select import ADAPTER_CONFIG
from toolkit.errors import Faults, UserError, listing

CONFIG = "config.json"
TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# What a model folder may hold that is no weight; other files (logs, optimizer states) stay behind.
_KEPT = (
    "generation_config.json", "*token*.json", "vocab*", "merges.txt", "*.model", "spm*", "*.vocab", "*.py",
    "chat_template*", "*preprocessor_config.json", "processor_config.json", "*labels*",
    "config_sentence_transformers.json", "sentence_bert_config.json", "modules.json",
)  # fmt: skip

# Models of one kind of layer, each with the same parameters, and the config's key of how many there are.
_LAYERS = {
    "bert": "num_hidden_layers", "roberta": "num_hidden_layers", "xlm-roberta": "num_hidden_layers",
    "camembert": "num_hidden_layers", "electra": "num_hidden_layers", "big_bird": "num_hidden_layers",
    "ernie": "num_hidden_layers", "nezha": "num_hidden_layers", "distilbert": "n_layers",
}  # fmt: skip
_LAYER = re.compile(r"(?P<stack>.*\blayer)\.(?P<number>\d+)\.(?P<rest>.*)$")
_ROWS = {
    "embeddings.word_embeddings.weight": "vocab_size",
    "embeddings.position_embeddings.weight": "max_position_embeddings",
    "embeddings.token_type_embeddings.weight": "type_vocab_size",
}
_HEADS = ("classifier.weight", "classifier.out_proj.weight")
_WITH_LABELS = ("ForSequenceClassification", "ForTokenClassification")


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
            name = TORCH_NAMES[dtype]  # `torch_dtype`: as transformers before 5 called it
            changed = {**self.config, "dtype": name} | ({"torch_dtype": name} if "torch_dtype" in self.config else {})
            text = json.dumps(changed, ensure_ascii=False, indent=2)
            (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


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


# the weights against the config


def check_config(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], path: Path, where: str) -> None:
    """Raises UserError naming every parameter that is missing or left over, as far as the config tells.

    `shapes`: by the model's names; `path`: the config's; `where`: the checkpoint, for the message.
    """
    known = config.get("model_type") in _LAYERS
    found = [
        *(_faults_of_layers(shapes, config, path) if known else ()),
        *(_faults_of_rows(shapes, config, path, known)),
    ]
    faults = Faults()
    for fault in found:
        faults.add(f"{where} {fault}")
    faults.raise_if_any()


def _faults_of_layers(shapes: Mapping[str, Any], config: Mapping[str, Any], path: Path) -> Iterator[str]:
    key = _LAYERS[str(config["model_type"])]
    count = config.get(key)
    layers: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in shapes:
        if match := _LAYER.match(name):
            layers[match["stack"]][int(match["number"])].add(match["rest"])
    if count and not layers:
        yield f"holds no layers, and {path} has {key} = {count}"
    for stack, found in layers.items():
        wanted = set(range(count)) if isinstance(count, int) else set(found)
        for what, numbers in (("lacks", wanted - set(found)), ("has left over", set(found) - wanted)):
            if numbers:
                yield f"{what} {listing(sorted(numbers))} of {stack}: {path} has {key} = {count}"
        every = set().union(*found.values())
        lacking = [f"{stack}.{number}.{rest}" for number in sorted(found) for rest in sorted(every - found[number])]
        if lacking:
            yield f"lacks {len(lacking)} parameters that other layers have: {listing(lacking, 5)}"


def _faults_of_rows(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], path: Path, known: bool
) -> Iterator[str]:
    """Embeddings and heads whose first dimension the config tells."""
    expected = {end: (config.get(key), f"{key} = {config.get(key)}") for end, key in _ROWS.items() if known}
    labelled = any(str(kind).endswith(_WITH_LABELS) for kind in config.get("architectures") or ())
    if labelled:
        labels = config.get("id2label")
        count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
        expected |= dict.fromkeys(_HEADS, (count, f"{count} labels"))
    for end, (rows, said) in expected.items():
        for name, shape in shapes.items():
            if (name == end if end in _HEADS else name.endswith(end)) and isinstance(rows, int) and shape[0] != rows:
                yield f"has {name} with {shape[0]} rows, and {path} has {said}"
    if known and not any(name.endswith("word_embeddings.weight") for name in shapes):
        yield f"lacks embeddings.word_embeddings.weight, which {path} asks for"
    if known and labelled and not any(head in shapes for head in _HEADS):
        yield f"lacks classifier.weight, which {config['architectures'][0]} of {path} has"


def check_built(folder: Path, shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]) -> str:
    """Compares with the model that transformers builds of the folder's config, without its weights.

    It runs in a process of its own, so that this one stays small. Returns what was done, or why it could
    not be. Raises UserError naming what is missing or left over.
    """
    finished = subprocess.run([sys.executable, "-c", _BUILD, str(folder)], capture_output=True, text=True, check=False)
    if finished.returncode:
        reason = finished.stderr.strip().split("\n")[-1]
        return f"not compared with the model's class: {reason[:200]}"
    built = json.loads(finished.stdout.strip().split("\n")[-1])
    expected = {name: tuple(shape) for name, shape in built["shapes"].items()}
    others = set(built["tied"]) | set(tied)
    missing = [name for name in expected if name not in shapes and name not in others]
    over = [name for name in shapes if name not in expected]
    wrong = [name for name, shape in shapes.items() if expected.get(name, shape) != shape]
    parts = [("lacks", missing), ("has left over", over), ("has in another shape", wrong)]
    faults = [f"{what} {listing(names, 5)}" for what, names in parts if names]
    if faults:
        raise UserError(f"against {built['class']}, which {folder.name}'s config names, the output {'; '.join(faults)}")
    return f"the {len(expected)} names and shapes are those of {built['class']}"


_BUILD = """
import json, os, sys
os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")
import torch, transformers
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
kind = getattr(transformers, config.architectures[0])
with torch.device("meta"):
    model = kind(config)
shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
names = {}
tied = []
for name, tensor in model.state_dict(keep_vars=True).items():
    if id(tensor) in names:
        tied += [name, names[id(tensor)]]
    names.setdefault(id(tensor), name)
print(json.dumps({"class": kind.__name__, "shapes": shapes, "tied": tied}))
"""
