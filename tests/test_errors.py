"""toolkit/errors.py: errors of files and memory are one line, others keep their traceback."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from toolkit.errors import system_error_line

FAULTS: dict[str, tuple[Callable[[], object], str | None]] = {
    "missing": (
        lambda: Path("/no/such.json").read_text(),
        "/no/such.json: No such file or directory",
    ),
    "a folder": (lambda: Path("/tmp").read_text(), "/tmp: Is a directory"),
    "full": (lambda: Path("/dev/full").write_text("x"), "No space left on device"),
    "weights": (
        lambda: save_file({"a": torch.ones(1)}, "/no/such.safetensors"),
        "No such file or directory",
    ),
    "memory": (lambda: bytearray(1 << 62), "out of memory"),
    "a bug": (lambda: {}["x"], None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_system_errors_are_one_line(fault: str) -> None:
    act, message = FAULTS[fault]
    with pytest.raises(Exception) as caught:  # noqa: PT011
        act()
    line = system_error_line(caught.value)
    assert (line is None) == (message is None)
    assert message is None or (message in str(line) and "\n" not in str(line))
