"""Reads YAML settings and launch configs strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import UserError


class _PlainLoader(yaml.SafeLoader):
    """Rejects duplicate keys, of which YAML silently drops the first, and aliases, which can expand a small file to
    gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"aliases (*{self.peek_event().anchor}) are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if duplicates := [key for key in keys if keys.count(key) > 1]:
            raise yaml.YAMLError(f"{duplicates[0]} is given twice")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """Raises UserError for a file that cannot be read or is not valid."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _PlainLoader)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line} is not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
