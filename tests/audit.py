"""Looks the installed packages up in PyPI's list of known vulnerabilities, with pip-audit.

    make audit

Exit code 1: a package has a known vulnerability. 0: none has, or the list cannot be reached from here, which is said.
"""

from __future__ import annotations

import json
import subprocess
import sys

SECONDS = 300


def main() -> int:
    command = [sys.executable, "-m", "pip_audit", "--skip-editable", "--format", "json", "--progress-spinner", "off"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=SECONDS, stdin=subprocess.DEVNULL
        )
        packages = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError) as error:
        print(
            f"nothing was checked: PyPI's list of vulnerabilities cannot be reached from here ({type(error).__name__})"
        )
        return 0
    checked = [package for package in packages if "vulns" in package]
    for package in checked:
        for fault in package["vulns"]:
            mended = " or ".join(fault["fix_versions"]) or "no version yet"
            print(f"{package['name']} {package['version']}: {fault['id']}, mended in {mended}")
    unchecked = sorted(package["name"] for package in packages if "vulns" not in package)
    if not checked:
        print(f"nothing was checked: PyPI knows none of the {len(packages)} packages from here")
    else:
        print(f"{len(checked)} packages checked; not checked: {', '.join(unchecked) or 'none'}")
    return int(any(package["vulns"] for package in checked))


if __name__ == "__main__":
    sys.exit(main())
