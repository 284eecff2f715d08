"""toolkit/errors.py: errors of files and memory are one line, others keep their traceback."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from toolkit.errors import system_error_line

FAULTS: list[tuple[Callable[[], object], str]] = [
    (lambda: Path("/no/such.json").read_text(), "/no/such.json: No such file or directory"),
    (lambda: save_file({"a": torch.ones(1)}, "/no/a.safetensors"), "No such file or directory"),
    (lambda: bytearray(1 << 62), "out of memory"),
    (lambda: {}["x"], "None"),  # a bug
    (lambda: Path("/dev/full").write_text("x"), "None"),  # no name: its traceback has the place
]


@pytest.mark.parametrize(("act", "message"), FAULTS)
def test_system_errors_are_one_line(act: Callable[[], object], message: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        act()
    line = str(system_error_line(caught.value))
    assert message in line
    assert "\n" not in line
