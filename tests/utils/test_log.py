"""What a user, or an application around this package, does with its lines on stderr."""

import sys
from pathlib import Path

import pytest

from tests.runs import start

LINE = "import toolkit.launch, logging; logging.getLogger('toolkit').info('a line')"


def stderr_of(code: str, cwd: Path) -> str:
    done = start([sys.executable, "-c", code], cwd=cwd).succeeded()
    assert done.out == ""
    return done.err


def test_line_is_printed_once(tmp_path: Path) -> None:
    assert stderr_of(LINE, tmp_path) == "a line\n"
    assert stderr_of(f"{LINE}; logging.info('theirs'); {LINE}", tmp_path) == "a line\na line\n"


def test_applications_logging_is_kept(tmp_path: Path) -> None:
    form = "format='%(levelname)s %(name)s %(message)s'"
    basic = f"import logging; logging.basicConfig(level='INFO', {form}); {LINE}"
    assert stderr_of(basic, tmp_path) == "INFO toolkit a line\n"
    to_file = f"import logging; logging.basicConfig(filename='log', level='INFO'); {LINE}"
    assert stderr_of(to_file, tmp_path) == ""
    assert "a line" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("level", "lines"), [("info", "a line\n"), ("warning", "")])
def test_log_level(level: str, lines: str, tmp_path: Path) -> None:
    words = f"['--log_level', '{level}']"
    parse = f"from toolkit import config; config.parse(config.TaskSettings, {words})"
    assert stderr_of(f"import toolkit.launch; {parse}; {LINE}", tmp_path) == lines
