"""Which functions of a checkout are not those of its release.

A refutation names the functions whose decisions are in its run; an author wants to know which of them are the
author's.  The checkout's files are compared with the fetched release's, function by function, comments and
docstrings aside.  Statements outside of functions count as their class, or as the module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from impl.upstream.env import Unavailable, prepared
from impl.upstream.releases import package_of

#: folders that hold what is driven or simulated
FOLDERS = ("v1", "distributed/kv_transfer", "model_executor/layers/mamba")
MODULE = "(module)"


@dataclass(frozen=True, slots=True)
class Function:
    """A function, a class's own statements, or a module's, that a checkout changed or added."""

    path: str  # under the package
    name: str  # "Class.method", "function", "Class" or MODULE
    line: int

    def __str__(self) -> str:
        return f"vllm/{self.path}::{self.name}:{self.line}"


def edited(tree: Path, release: str) -> tuple[Function, ...]:
    """What a tree changed or added against its release; :class:`Unavailable` if that one was not fetched."""
    package, original = package_of(tree), package_of(prepared(release).tree.directory)
    return tuple(_edited(package, original))


def known_edits(tree: Path, release: str) -> tuple[Function, ...]:
    """The same; nothing where the release was not fetched."""
    try:
        return edited(tree, release)
    except Unavailable:
        return ()


def _edited(package: Path, original: Path) -> Iterator[Function]:
    if package.resolve() == original.resolve():
        return
    for folder in FOLDERS:
        for path in sorted((package / folder).rglob("*.py")):
            name = path.relative_to(package).as_posix()
            before = original / name
            source = path.read_bytes()
            was = before.read_bytes() if before.exists() else b""
            if source == was:
                continue
            try:
                now, then = parts(ast.parse(source)), parts(ast.parse(was))
            except (SyntaxError, ValueError):
                yield Function(name, MODULE, 1)
                continue
            for unit, (line, text) in now.items():
                if then.get(unit, (0, ""))[1] != text:
                    yield Function(name, unit, line)


def parts(module: ast.Module) -> dict[str, tuple[int, str]]:
    """Line and content of every function, and of what is outside of functions; a nested function belongs to
    the one around it."""
    found: dict[str, tuple[int, str]] = {}

    def walk(body: list[ast.stmt], inside: str, line: int, head: str) -> None:
        own = [head]
        for node in body:
            name = f"{inside}.{node.name}" if inside and hasattr(node, "name") else getattr(node, "name", "")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = _undocumented(node.body)
                line_, before = found.get(name, (node.lineno, ""))  # overloads and properties share a name
                found[name] = (line_, before + ast.dump(node))
            elif isinstance(node, ast.ClassDef):
                outer = ast.ClassDef(node.name, node.bases, node.keywords, [], node.decorator_list)
                walk(_undocumented(node.body), name, node.lineno, ast.dump(outer))
            else:
                own.append(ast.dump(node))
        found[inside or MODULE] = (line, "\n".join(own))

    walk(_undocumented(module.body), "", 1, "")
    return found


def _undocumented(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if documented else body
