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


def with_new_tokens(settings: EncoderSettings, accelerator: Any) -> EncoderSettings:
    """The settings with a folder of the tokenizer and the config that have the new tokens, where there are any; made
    once per machine, and all processes call this. Raises UserError for words that cannot be added."""
    if settings.init_new_tokens is None:
        return settings
    name, words = str(settings.model_name_or_path), _words(settings.init_new_tokens)

    def write(folder: Path) -> None:
        tokenizer, config = load_plain_tokenizer(name), load_config(settings)
        single = [
            word for word in words if len(ids := _pieces(tokenizer, word)) == 1 and ids != [tokenizer.unk_token_id]
        ]
        if single or len({*words}) < len(words):
            twice = sorted({word for word in words if words.count(word) > 1})
            what = f"{listing(single or twice, 5)} {'are tokens already' if single else 'occur twice'}"
            raise UserError(f"--init_new_tokens {settings.init_new_tokens}: {what}: take them out of the file")
        for word in words:  # Chinese is found within a clause, other words whole, with the space before them
            other = {} if re.search(f"[{HAN}]", word) else {"single_word": True, "lstrip": True}
            tokenizer.add_tokens([AddedToken(word, normalized=bool(other), **other)])
        tokenizer.save_pretrained(folder)
        config.vocab_size = max(config.vocab_size, len(tokenizer))
        config.to_json_file(folder / "config.json")

    digest = digest_of_text(f"{content_of(name)} {words}")
    return replace(settings, model_name_or_path=str(made_once("models", digest, write, accelerator, name)))


def _words(file: str) -> list[str]:
    try:
        words = [word for line in Path(file).read_text(encoding="utf-8").splitlines() if (word := line.strip())]
    except (OSError, UnicodeError) as error:
        raise UserError(f"--init_new_tokens {file} cannot be read as UTF-8: {error}") from error
    if not words or any(map(str.isspace, "".join(words))):
        raise UserError(f"--init_new_tokens {file}: name a word on each line, without a space in it")
    return words


def _pieces(tokenizer: Any, word: str) -> list[int]:
    return list(tokenizer(f" {word}", add_special_tokens=False)["input_ids"])


@torch.no_grad()
def init_new_tokens(model: Any, tokenizer: Any, settings: EncoderSettings) -> None:
    """Gives each new token the mean of the embeddings (and of the output's biases) that it was read as before."""
    if settings.init_new_tokens is None:
        return
    before, embeddings = load_plain_tokenizer(str(settings.model_name_or_path)), model.get_input_embeddings()
    if len(tokenizer) > embeddings.num_embeddings:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    head = model.get_output_embeddings()
    tables = {id(table): table for table in (model.get_input_embeddings().weight, *head.parameters())}
    for word in _words(settings.init_new_tokens):
        for table in tables.values():
            table[tokenizer.convert_tokens_to_ids(word)] = table[_pieces(before, word)].mean(dim=0)
