"""Jinja templates of the model card, report.html and the pages of features, and their filters."""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from toolkit.utils.language import Language


def render(template: str | Path, context: Mapping[str, Any]) -> str:
    """Renders a template of this folder (by name) or of a feature (by path), with escaping in
    HTML. `t("{count} rows", count=3)` there is a sentence in the language of the run, which is
    `record` in the context."""
    path = Path(__file__).parent / template
    environment = _environment(path.suffix == ".html", context["record"].language)
    return environment.from_string(path.read_text(encoding="utf-8")).render(context)


def render_blocks(template: str | Path, context: Mapping[str, Any]) -> dict[str, Markup]:
    """Renders each block of a feature's HTML template (a path or the text) -> its name and HTML; as
    `render`."""
    if isinstance(template, Path):
        template = template.read_text(encoding="utf-8")
    loaded = _environment(True, context["record"].language).from_string(template)
    blocks = {}
    for name, block in loaded.blocks.items():
        blocks[name] = Markup("".join(block(loaded.new_context(dict(context)))))
    return blocks


@functools.cache
def _environment(escapes: bool, language: str) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=escapes,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    translated = Language(language)
    text = Markup if escapes else str

    def fill(sentence: str, **values: Any) -> str:
        return text(translated.sentence(sentence)).format(**values)

    environment.globals |= {"t": fill, "language": language}
    environment.filters |= {"sentence": translated.sentence, "line": translated.line}
    environment.filters["number"] = format_number
    environment.filters["cell"] = cell
    return environment


def format_number(value: Any) -> str:
    """`7677` -> `7,677`, `0.745603` -> `0.7456`, `5e-05` -> `5e-05`; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4f}"
    return f"{value:.4g}"


def cell(value: object) -> str:
    """Escapes text for a cell of a Markdown table."""
    text = html.escape(" ".join(str(value).split()), quote=False)
    # an underscore inside a word is not markup
    return re.sub(r"[\\`*\[\]|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", text)
