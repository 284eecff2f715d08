"""Starts groups of processes at the same time, for `runs.groups`: groups.py MODULE {"2": [WORD, ...], "3": [...]}"""

from __future__ import annotations

import json
import subprocess
import sys

if __name__ == "__main__":
    started = [
        subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes,
                          "-m", sys.argv[1], *words])
        for processes, words in json.loads(sys.argv[2]).items()
    ]  # fmt: skip
    codes = [process.wait() for process in started]
    sys.exit(any(codes))
