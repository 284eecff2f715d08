"""What a user, or an application around this package, does with its lines on stderr."""

import sys
from pathlib import Path

import pytest

from tests.runs import start

LINE = "import toolkit.launch, logging; logging.getLogger('toolkit').info('a line')"
SETUP = "import logging; logging.basicConfig(level='INFO', "
CASES = {
    LINE: "a line\n",
    f"{LINE}; logging.info('theirs'); {LINE}": "a line\na line\n",  # once each
    f"{SETUP}format='%(name)s %(message)s'); {LINE}": "toolkit a line\n",  # an application's
    f"{SETUP}filename='log'); {LINE}": "",
}


@pytest.mark.parametrize("code", CASES)
def test_lines(code: str, tmp_path: Path) -> None:
    done = start([sys.executable, "-c", code], cwd=tmp_path).succeeded()
    assert (done.out, done.err) == ("", CASES[code])
