"""Recipes by name, for `toolkit` commands that take the settings of one."""

from __future__ import annotations

import re
from typing import Any

from toolkit.config.parse import parse, tasks
from toolkit.errors import UserError, did_you_mean


def begins_with_name(arguments: list[str]) -> bool:
    """Whether the first word is a name (of a recipe or a model): no setting, and no file of settings."""
    return bool(arguments) and not re.search(r"^-|\.ya?ml$", arguments[0])


def settings_of_recipe(recipe: str, arguments: list[str], command: str, description: str) -> Any:
    """The settings of a recipe, for `toolkit COMMAND`. Raises UserError."""
    known = tasks()
    if recipe not in known:
        raise UserError(f"toolkit {command} {recipe}{did_you_mean(recipe, known)}: {', '.join(known)}")
    return parse(known[recipe], arguments, None, description, f"toolkit {command} [{'|'.join(known)}]")
