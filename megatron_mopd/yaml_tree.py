"""YAML files and `a.b=c` overrides as plain nested dicts: read, overlay, set, write.

Two habits of PyYAML would hurt a configuration: it reads `lr: 1e-4` as a string, and of two equal keys it drops the
first without a word. Here the former is a number (as in YAML 1.2) and the latter is refused, as are aliases that refer
to themselves or multiply. Promises: nothing changes its arguments; `read_yaml` of what `write_yaml` wrote is the same
tree; every mistake is a UserError of one line.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import Any

import yaml

from megatron_mopd.errors import UserError

Tree = dict[str, Any]

MAX_NODES = 100_000
"""Values of a file with its aliases written out; one that has more was not meant as a configuration."""

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$")


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} is set twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that _Loader would read as numbers; paths are strings, tuples lists."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))
_Dumper.add_representer(tuple, yaml.SafeDumper.represent_list)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def read_yaml(file: Path) -> Tree:
    if not file.is_file():
        raise UserError(f"config file {file} does not exist" if not file.exists() else f"{file} is not a file")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {file} cannot be read: {error}") from None
    tree = _parse(text, str(file))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{file} must hold a mapping at its top, not a {type(tree).__name__}")
    return tree


def _parse(text: str, where: str) -> Any:
    try:
        tree = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{where}:{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date or number that is none
        raise UserError(f"{where} is not valid YAML: {error}") from None
    _refuse_a_bomb(tree, where)
    return tree


def _refuse_a_bomb(tree: Any, where: str) -> None:
    count, waiting = 0, [tree]
    while waiting and count <= MAX_NODES:
        node = waiting.pop()
        count += 1
        waiting.extend(node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
    if count > MAX_NODES:
        raise UserError(f"{where} holds more than {MAX_NODES} values; write it without aliases that multiply")


def write_yaml(tree: Tree) -> str:
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)


def overlay(below: Tree, above: Tree) -> Tree:
    """`above` over `below`: tables merge key by key, everything else (lists too) is replaced."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = overlay(merged[key], value) if both else value
    return merged


def override(tree: Tree, text: str) -> Tree:
    """`tree` with one `a.b=c` applied; c is YAML, and a number in the path is an index into a list.

    Example: override({"a": [1, 2]}, "a.1=5") is {"a": [1, 5]}
    """
    path, _, value_text = text.partition("=")
    keys = path.split(".")
    if not all(keys):
        raise UserError(f"override {text!r}: write it as table.option=value")
    try:
        value = _parse(value_text, "it")
    except UserError as error:
        raise UserError(f"override {text!r}: the value is not valid YAML ({error})") from None
    return _set(tree, keys, value, text)


def _set(node: Any, keys: list[str], value: Any, text: str) -> Any:
    if not keys:
        return value
    key, *rest = keys
    if isinstance(node, list):
        if key not in map(str, range(len(node))):
            raise UserError(f"override {text!r}: {key} is not an index into a list of {len(node)}")
        index = int(key)
        return [*node[:index], _set(node[index], rest, value, text), *node[index + 1 :]]
    if isinstance(node, dict):
        return {**node, key: _set(node.get(key, {}), rest, value, text)}
    raise UserError(f"override {text!r}: what {key} would be set in is the value {node!r}, not a table")
