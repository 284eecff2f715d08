"""Puts the recipes and config files, which lie at the top of the repository, into the wheel: `toolkit init` copies them
from there. MANIFEST.in names each. Everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

TEMPLATES = [
    line.removeprefix("include ")
    for line in Path("MANIFEST.in").read_text().splitlines()
    if line[0] != "#"
]


class BuildWithTemplates(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # the clone's own folders are used
        for path in TEMPLATES:
            target = Path(self.build_lib, "toolkit", "templates", path)
            self.mkpath(str(target.parent))
            self.copy_file(path, str(target))


setup(cmdclass={"build_py": BuildWithTemplates})
