"""`--init_new_tokens`: words that become tokens of their own."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken

from toolkit.errors import UserError, listing
from toolkit.features.pretraining.settings import EncoderSettings
from toolkit.features.pretraining.words import HAN
from toolkit.pretrained import content_of, load_config, load_plain_tokenizer
from toolkit.utils.cache import digest_of_text, made_once

_LAYOUT = 1  # raise when the content of the folder changes


def read_words(path: Path, tokenizer: Any) -> list[str]:
    """The words of a file, one a line. Raises UserError for a file without any, and for words that the vocabulary has,
    that occur twice, or that hold a space."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise UserError(f"--init_new_tokens {path} cannot be read as UTF-8: {error}") from error
    words = [word for line in lines if (word := line.strip())]
    if not words:
        raise UserError(f"--init_new_tokens {path} holds no word")
    single = {word for word in words if len(tokenizer.tokenize(word)) == 1 and tokenizer.unk_token not in
              tokenizer.tokenize(word)}  # fmt: skip
    faults = {"are tokens already": sorted(single & {*words}),
              "occur twice": sorted({word for word in words if words.count(word) > 1}),
              "hold a space": [word for word in words if re.search(r"\s", word)]}  # fmt: skip
    for what, some in faults.items():
        if some:
            raise UserError(f"--init_new_tokens {path}: {listing(some, 5)} {what}: take them out of the file")
    return words


def with_new_tokens(settings: EncoderSettings, accelerator: Any) -> EncoderSettings:
    """The settings with a folder of the tokenizer and the config that have the new tokens, where there are any; made
    once per machine, and all processes call this. Raises UserError as `read_words`."""
    if settings.init_new_tokens is None:
        return settings
    name = str(settings.model_name_or_path)
    config, tokenizer = load_config(settings), load_plain_tokenizer(name)
    words = read_words(Path(settings.init_new_tokens), tokenizer)

    def write(folder: Path) -> None:
        tokenizer.add_tokens([added_token(word) for word in words])
        ids = tokenizer.convert_tokens_to_ids(words)
        if wrong := [
            word for word, number in zip(words, ids, strict=True)
            if tokenizer(f"a {word} a")["input_ids"].count(number) != 1
        ]:  # fmt: skip
            raise UserError(f"--init_new_tokens: {listing(wrong, 5)} would not be read as one token")
        tokenizer.save_pretrained(folder)
        config.vocab_size = max(config.vocab_size, len(tokenizer))
        config.to_json_file(folder / "config.json")

    digest = digest_of_text(f"{_LAYOUT} {content_of(name)} {words}")
    return replace(settings, model_name_or_path=str(made_once("models", digest, write, accelerator, name)))


def added_token(word: str) -> AddedToken:
    """Chinese is found within a clause; other words are found whole, with the space before them, in any case that the
    tokenizer folds."""
    if re.search(f"[{HAN}]", word):
        return AddedToken(word, normalized=False)
    return AddedToken(word, single_word=True, lstrip=True, normalized=True)


@torch.no_grad()
def init_new_tokens(model: Any, tokenizer: Any, settings: EncoderSettings) -> None:
    """Gives each new token the mean of the embeddings (and of the output's biases) that it was read as before."""
    if settings.init_new_tokens is None:
        return
    before = load_plain_tokenizer(str(settings.model_name_or_path))
    words = read_words(Path(settings.init_new_tokens), before)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    decoder = model.get_output_embeddings()
    tables = [model.get_input_embeddings().weight, decoder.weight, decoder.bias]
    for word in words:
        pieces = before(f" {word}", add_special_tokens=False)["input_ids"]
        for table in {id(table): table for table in tables if table is not None}.values():
            table[tokenizer.convert_tokens_to_ids(word)] = table[pieces].mean(dim=0)
