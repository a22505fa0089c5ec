"""Who imports whom, read from the source: imports inside functions and those for type checkers count like any other."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Set
from pathlib import Path


def modules(root: Path) -> dict[str, Path]:
    """The modules of all packages below a folder, by name."""
    found = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(file: Path, known: Set[str]) -> set[str]:
    """What a file imports: modules of ours by their full name, others by the name of their package."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {_module(alias.name, known) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{file}: imports are written in full"
            assert not node.level, f"{file}: imports are written in full"
            found |= {_module(f"{node.module}.{alias.name}", known) for alias in node.names}
    return found


def graph(root: Path) -> dict[str, set[str]]:
    """What each module imports, itself left out."""
    known = modules(root)
    return {name: imported(file, known.keys()) - {name} for name, file in known.items()}


def reached(start: str, edges: Mapping[str, Set[str]]) -> set[str]:
    """Everything that a module imports, directly or through others."""
    found: set[str] = set()
    todo = [start]
    while todo:
        for other in edges.get(todo.pop(), set()) - found:
            found.add(other)
            todo.append(other)
    return found


def cycles(edges: Mapping[str, Set[str]]) -> list[str]:
    """The modules that import themselves through others."""
    return sorted(name for name in edges if name in reached(name, edges))


def _module(name: str, known: Set[str]) -> str:
    """The module that a dotted name lies in."""
    while name not in known and "." in name:
        name = name.rpartition(".")[0]
    return name
