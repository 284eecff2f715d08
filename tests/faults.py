"""Errors that a test expects."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from toolkit.errors import UserError


def refusal(
    act: Callable[..., Any], *given: Any, says: Sequence[str] = (), match: str | None = None, lines: int = 1,
    **named: Any,
) -> str:  # fmt: skip
    """The line of the UserError that this call ends with; each of `says` stands in it, and so does `match`."""
    with pytest.raises(UserError, match=match) as raised:
        act(*given, **named)
    said = str(raised.value)
    assert said.count("\n") == lines - 1, said
    assert [words for words in says if words not in said] == [], said
    return said
