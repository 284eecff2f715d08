"""Any BERT -> a BigBird of the same weights that reads long texts.

BigBird (Zaheer et al. 2020, arXiv:2007.14062) has BERT's layers; what differs is which tokens attend to which. So
every weight moves over as it is, but for the position table, which is repeated until it is long enough, as Longformer
does (Beltagy et al. 2020, arXiv:2004.05150, section 5). Up to (5 + 2 random) * block tokens BigBird runs full
attention: within BERT's own positions it then gives BERT's numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from transformers.utils import cached_file

from toolkit.cache import digest_of_file, made_once
from toolkit.config import ModelSettings, PretrainedSettings
from toolkit.demo import PREFIX, model_path
from toolkit.errors import UserError, listing
from toolkit.files import replace_folder, writing
from toolkit.models import to_bigbird_weights as weights
from toolkit.models.bigbird import plan
from toolkit.models.to_bigbird_weights import SparseSizes
from toolkit.pretrained import load_config, load_plain_tokenizer

if TYPE_CHECKING:
    from accelerate import Accelerator

Settings = TypeVar("Settings", bound=PretrainedSettings)

MAX_LENGTH, BLOCK_SIZE, RANDOM_BLOCKS = 4096, 64, 3
_MADE_BY = "toolkit to-bigbird"
_META = "meta.json"
_LAYOUT = 1  # of what is in the cache: a change here or in to_bigbird_weights that changes it counts this up
_SOURCE_FILES = (".json", ".txt", ".model", ".safetensors", ".bin")
# What a tokenizer that was saved and loaded wrongly would read differently: case, accents, Chinese, special tokens
_PROBES = ("今天的服務很好，房间小。", "The Café's 2nd ROOM wasn't bad!\n東京 [MASK] 42", "ﬁlm\u3000𠮷 😀 ２０２４年")


@dataclass(frozen=True)
class Converted:
    """What was made of a BERT."""

    output: Path
    positions_before: int
    """Tokens the BERT could read."""
    positions: int
    """Tokens the BigBird can read."""
    sparse_above: int
    """Tokens up to which it runs full attention."""
    parameters: int
    heads: tuple[str, ...]
    """Kept: MLM, NSP."""
    has_pooler: bool
    """A BERT saved as masked language model, tagger or reader has none."""
    left_behind: tuple[str, ...]
    """Names of weights that have no place in a BigBird: the head of a task."""


def to_bigbird(
    source: str,
    output: Path,
    max_length: int = MAX_LENGTH,
    block_size: int = BLOCK_SIZE,
    num_random_blocks: int = RANDOM_BLOCKS,
    overwrite: bool = False,
) -> Converted:
    """Writes a BigBird with the weights of `source` (a folder, a hub name or a `demo:` name) to the folder `output`.

    The folder has its name only when it is complete. With `overwrite` it may replace one that this function wrote
    and nobody has changed since. Raises UserError for a source that is no BERT, lacks a tokenizer or does not fit its
    config, for a length that does not fit, and for an output that is there.
    """
    _check_place(output, overwrite)
    sizes = SparseSizes(max_length, block_size, num_random_blocks)
    config = load_config(ModelSettings(model_name_or_path=source))
    _check_kind(source, config)
    _check_length(source, config, sizes)
    with writing(output), replace_folder(output, overwrite) as draft:
        return dataclasses.replace(_write(source, draft, sizes), output=output)


def long_model(settings: Settings, max_length: int | None, accelerator: Accelerator | None = None) -> Settings:
    """The settings with a BigBird in place of a BERT, of 4096 positions or `max_length` tokens if that is more.

    It is made once per machine and kept in the cache; all processes must call this. A BigBird, and no model, are
    left alone. Raises UserError for other models.
    """
    if settings.model_name_or_path is None:
        return settings
    name, config = settings.model_name_or_path, load_config(settings)
    if config.model_type in ("big_bird", "encoder-decoder"):  # the latter was made of one, by recipes/title.py
        return settings
    _check_kind(name, config)
    wanted = max(MAX_LENGTH, max_length or 0, config.max_position_embeddings)
    sizes = SparseSizes(-(-wanted // BLOCK_SIZE) * BLOCK_SIZE, BLOCK_SIZE, RANDOM_BLOCKS)
    path = made_once("models", _folder_name(name, sizes), lambda draft: _make(name, draft, sizes), accelerator)
    return dataclasses.replace(settings, model_name_or_path=str(path))


def _folder_name(name: str, sizes: SparseSizes) -> str:
    """Of the content, and told apart by a reader: a model card calls its base model by this."""
    base = re.sub(r"[^\w.-]", "-", Path(name.removeprefix(PREFIX)).absolute().name)
    content = hashlib.sha256(f"{_LAYOUT} {sizes} {_digest(name)}".encode()).hexdigest()[:16]
    return f"{base}-bigbird-{sizes.max_length}-{content}"


def _digest(name: str) -> str:
    """Of what `name` holds now: the content of a folder's files, or the commit of a hub's model."""
    folder = Path(model_path(name))
    if not folder.is_dir():  # the config has just been loaded from snapshots/COMMIT/config.json
        return f"{name}@{Path(str(cached_file(name, 'config.json'))).parent.name}"
    files = sorted(path for path in folder.iterdir() if path.suffix in _SOURCE_FILES and path.is_file())
    return " ".join(f"{path.name}:{digest_of_file(path)}" for path in files)


def _make(name: str, draft: Path, sizes: SparseSizes) -> None:
    _write(name, draft, sizes)


def _write(name: str, folder: Path, sizes: SparseSizes) -> Converted:
    """Fills an empty folder. Raises UserError when the source cannot be loaded or does not fit."""
    tokenizer = load_plain_tokenizer(name)
    source = weights.load(name)
    model = weights.build(name, source, weights.config_of(source.model, tokenizer, sizes))
    weights.save(model, folder)
    _save_tokenizer(name, tokenizer, folder, sizes.max_length)
    _finish(name, folder)
    return Converted(
        output=folder,
        positions_before=source.model.config.max_position_embeddings,
        positions=sizes.max_length,
        sparse_above=sizes.sparse_above,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        heads=source.heads,
        has_pooler=source.has(weights.POOLER),
        left_behind=tuple(sorted({*source.unknown, *weights.unused_heads(source)})),
    )


def _save_tokenizer(name: str, tokenizer: Any, folder: Path, max_length: int) -> None:
    """Keeps BERT's, and makes sure that it is what AutoTokenizer finds beside a BigBird's config, not BigBird's own.

    Raises UserError when it reads a text otherwise.
    """
    tokenizer.model_max_length = max_length
    read = tokenizer(list(_PROBES)).input_ids  # also takes off a truncation that tokenizer.json may have brought
    tokenizer.save_pretrained(folder)
    again = load_plain_tokenizer(str(folder))
    if type(again) is not type(tokenizer) or again(list(_PROBES)).input_ids != read:
        raise UserError(
            f"{name}: its tokenizer, a {type(tokenizer).__name__}, is a {type(again).__name__} after saving and may "
            "read texts otherwise: name its class as tokenizer_class in its tokenizer_config.json"
        )


def _finish(name: str, folder: Path) -> None:
    """Files for everybody to read, and a note of what was written."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.iterdir():
        path.chmod(0o666 & ~mask)  # safetensors leaves its files to their owner alone
    files = {path.name: digest_of_file(path) for path in sorted(folder.iterdir())}
    meta = {"made_by": _MADE_BY, "layout": _LAYOUT, "source": name, "files": files}
    (folder / _META).write_text(json.dumps(meta, ensure_ascii=False, indent=1), encoding="utf-8")


def _check_kind(name: str, config: Any) -> None:
    """Raises UserError for a model whose weights do not mean in a BigBird what they mean in it."""
    kind = config.model_type
    if kind == "big_bird":
        raise UserError(f"{name} is a BigBird already, of {config.max_position_embeddings} positions: use it as it is")
    if kind != "bert":
        raise UserError(
            f"{name} is of model_type {kind}, and only bert becomes a BigBird: bert-base-chinese, bert-base-uncased, "
            "hfl/chinese-roberta-wwm-ext (a BERT, whatever its name says), or name a BigBird itself"
        )
    positions = getattr(config, "position_embedding_type", None) or "absolute"  # old configs have it
    if positions != "absolute":
        raise UserError(
            f"{name} has position_embedding_type {positions}, which BigBird has not: take a BERT with absolute "
            "positions, as most have"
        )
    if config.is_decoder or config.add_cross_attention:
        raise UserError(f"{name} is a decoder (is_decoder or add_cross_attention in its config.json): take an encoder")


def _check_length(name: str, config: Any, sizes: SparseSizes) -> None:
    """Raises UserError for lengths that make no sense together."""
    length, block, random = sizes.max_length, sizes.block_size, sizes.num_random_blocks
    given = f"--block_size {block} and --num_random_blocks {random}"
    if block < 1 or random < 1:
        raise UserError(f"{given}: both are at least 1; 64 and 3 are usual")
    if length < config.max_position_embeddings:
        raise UserError(
            f"--max_length {length} is less than the {config.max_position_embeddings} positions {name} has: ask for "
            "more, or cut texts when they are tokenized"
        )
    if length % block:
        raise UserError(
            f"--max_length {length} is no multiple of --block_size {block}: take {-(-length // block) * block}"
        )
    if length <= sizes.sparse_above:
        raise UserError(
            f"--max_length {length} is too short for the sparse pattern: with {given} texts of up to "
            f"{sizes.sparse_above} tokens get full attention; take {sizes.sparse_above + block} or more, or "
            "smaller blocks"
        )
    if not _draws(sizes):
        raise UserError(f"{given} want more random blocks than BigBird draws from (the first 1024 tokens): take fewer")


def _draws(sizes: SparseSizes) -> bool:
    """Whether there are enough blocks to draw from at the lengths with a rule of their own: otherwise training ends
    at the first batch of such a length."""
    drawn = plan.Pattern(
        seed=0, heads=1, block=sizes.block_size, random=sizes.num_random_blocks, longest=sizes.max_length
    )
    try:
        for length in range(sizes.sparse_above // 1024 * 1024 + 1024, min(sizes.max_length, 4096) + 1, 1024):
            if length % sizes.block_size == 0:
                plan.random_blocks(drawn, length, training=True)
    except ValueError:
        return False
    return True


def _check_place(output: Path, overwrite: bool) -> None:
    """Raises UserError when something is there that must not be replaced."""
    if not output.name or output.name == "..":
        raise UserError(f"the output {str(output)!r} is no name of a folder to make")
    if os.path.lexists(output) and (not output.is_dir() or output.is_symlink()):
        raise UserError(f"{output} is there and is not a folder: name another output")
    present = sorted(output.iterdir()) if output.exists() else []
    if present and not overwrite:
        raise UserError(f"{output} is there and not empty: name another folder, or replace it with --overwrite")
    if foreign := [path.name for path in present if not _is_ours(path)]:
        raise UserError(
            f"{output} holds {listing(foreign, 3)}, not as {_MADE_BY} wrote it, and --overwrite would remove that: "
            "name another folder, or take it away yourself"
        )


def _is_ours(path: Path) -> bool:
    """Whether this command wrote the file, and nobody since."""
    try:
        meta = json.loads((path.parent / _META).read_text(encoding="utf-8"))
        written = meta["made_by"] == _MADE_BY
        return written and (path.name == _META or meta["files"].get(path.name) == digest_of_file(path))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
