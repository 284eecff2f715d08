"""Puts the recipes and config files, which lie at the top of the repository, into the wheel: `toolkit init` copies them
from there. Everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

TEMPLATES = ("recipes/*.py", "recipes/*.yaml", "accelerate_configs/*.yaml", "ds_configs/*.json")


class BuildWithTemplates(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # the clone's own folders are used
        for path in sorted(path for pattern in TEMPLATES for path in Path().glob(pattern)):
            target = Path(self.build_lib, "toolkit", "templates", path)
            self.mkpath(str(target.parent))
            self.copy_file(str(path), str(target))


setup(cmdclass={"build_py": BuildWithTemplates})
