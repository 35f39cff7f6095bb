"""Every configuration key with its type, default and meaning: `python -m trainer.keys`.

The meaning of a key is the string below its field, and `docs/configuration.md` is this program's
output: there is one place to write it.
"""

import ast
import dataclasses
import inspect
import textwrap
from dataclasses import MISSING, is_dataclass
from typing import Any, get_type_hints

from trainer.config import Config
from trainer.plugins import node_types, tasks


def field_docs(kind: type) -> dict[str, str]:
    """The string that follows each field of a dataclass (or of what it extends), on one line."""
    docs: dict[str, str] = {}
    for base in kind.__bases__:
        if is_dataclass(base):
            docs |= field_docs(base)
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    name = None
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            docs[name] = " ".join(str(node.value.value).split())
            name = None
        else:
            name = None
    return docs


def rows(kind: type, prefix: str) -> list[tuple[str, str, str, str]]:
    """Key, type, default and meaning of every field, nested ones dotted."""
    found = []
    docs, hints = field_docs(kind), get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if is_dataclass(hint) and isinstance(hint, type):
            found += rows(hint, f"{prefix}{field.name}.")
            continue
        name = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else hint
        words = str(name).replace(" | None", "").replace("typing.", "")
        found.append((f"{prefix}{field.name}", words, _default(field), docs.get(field.name, "")))
    return found


def _default(field: Any) -> str:
    value = field.default_factory() if field.default is MISSING else field.default
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value).replace("'", "")


def markdown() -> str:
    """All keys as one table per node; those of tasks in our own package, by task."""
    parts = []
    hints = get_type_hints(Config)
    for node, hint in hints.items():
        if is_dataclass(hint) and isinstance(hint, type):
            parts.append(_table(node, hint, ""))
    for name, task in tasks().items():
        if task.__module__.startswith("recipes."):
            for node, kind in node_types(task).items():
                parts.append(_table(node, kind, f" of task `{name}`"))
    return "\n".join(parts)


def _table(node: str, kind: type, suffix: str) -> str:
    lines = [f"### `{node}`{suffix}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for key, words, default, meaning in rows(kind, f"{node}."):
        cells = (f"`{key}`", words, f"`{default}`", meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(markdown())
