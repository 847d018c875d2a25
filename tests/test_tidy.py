"""The repository's shape: its layout, what imports what, and that every module says what it is for."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("spec", "impl", "props", "tests")
TOP_LEVEL = {
    ".ci",
    ".gitignore",
    "LICENSE",
    "README.md",
    "docs",
    "impl",
    "props",
    "pyproject.toml",
    "spec",
    "tests",
}

# A name that could hold anything says nothing.
THEMELESS = {"common", "helper", "helpers", "misc", "util", "utils", "tools", "lib"}

# Written in two halves so that this file does not contain them.
BANNED_TEXT = re.compile(
    "|".join((r"\.\./" + "shared", "/" + "work/", r"\." + "library", "Claude " + "Code", "as an " + "AI"))
)

LONGEST_FUNCTION_LINES = 110

# Who may import whom: a package -> the packages of this repository that its modules may import.
DIRECTION = {
    "spec": {"spec"},
    "impl": {"spec", "impl"},
    "props": {"spec", "impl", "props"},
    "tests": {"spec", "impl", "props", "tests"},
}
# Outside libraries that a package must do without, and the folder that may use one all the same.
FOREIGN = {
    "spec": {"torch", "triton", "vllm", "numpy", "hypothesis", "pytest", "z3", "cvc5"},
    "impl": {"hypothesis", "pytest", "z3", "cvc5"},
}
SOLVERS = {"z3", "cvc5"}
# Imported inside the one function that needs it; that the module loads without it is tested below.
LATE = {
    "spec/faults/hunt.py": {"hypothesis", "spec.prove"},
}
# An implementation must not know the answer: these modules of spec are for harnesses only.
ANSWERS = re.compile(r"spec\.(prove|policies|contracts?|lockstep|faults?|reference)\b")
HARNESSES: frozenset[str] = frozenset(
    {
        "impl/inject.py",
        "impl/refine.py",
        "impl/world.py",
        "impl/upstream/check.py",
        "impl/upstream/matrix.py",
        "impl/upstream/drive.py",
    }
)


def tracked() -> list[Path]:
    """Files that git tracks; without git, all that are not obviously generated."""
    try:
        done = subprocess.run(
            ["git", "ls-files"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        names = done.stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        skip = re.compile(r"(^|/)(\.|__pycache__|build|dist|[^/]*\.egg-info)")
        names = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")]
        names = [n for n in names if n.startswith(".ci/") or not skip.search(n)]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


FILES = tracked()
MODULES = [p for p in FILES if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in PACKAGES]


def name_of(path: Path) -> str:
    """``spec/arith/align.py`` -> ``spec.arith.align``; a package's ``__init__`` has the package's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, module: str, package: bool) -> Iterator[str]:
    """Dotted names that a module imports, relative ones resolved; ``from a import b`` gives a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + (1 if package else 0)]
                base = ".".join([*parts, base] if base else parts)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_by(path: Path) -> set[str]:
    return set(imports(parsed(path), name_of(path), path.name == "__init__.py"))


def violations(path: Path, names: set[str]) -> list[str]:
    """Imports of one module that its place in the repository forbids."""
    relative = path.relative_to(ROOT)
    package = relative.parts[0]
    found = []
    for name in sorted(names):
        top = name.split(".")[0]
        if top in PACKAGES and top not in DIRECTION[package]:
            found.append(f"{relative} imports {name}: {package} must not import {top}")
        solver = top in SOLVERS and relative.parts[:2] == ("spec", "prove")
        if top in FOREIGN.get(package, ()) and not solver and top not in LATE.get(str(relative), ()):
            found.append(f"{relative} imports {name}: not allowed in {package}")
        late = "spec.prove" in LATE.get(str(relative), ())
        if package == "spec" and relative.parts[1] != "prove" and name.startswith("spec.prove") and not late:
            found.append(f"{relative} imports {name}: needs a solver, which only spec.prove may")
        if package == "impl" and str(relative) not in HARNESSES and ANSWERS.match(name):
            found.append(f"{relative} imports {name}: an implementation must not know the reference")
    return found


def test_top_level_layout() -> None:
    assert {p.relative_to(ROOT).parts[0] for p in FILES} <= TOP_LEVEL


def test_there_are_modules_to_look_at() -> None:
    assert len(MODULES) > 10 and {p.relative_to(ROOT).parts[0] for p in MODULES} >= {"spec", "props", "tests"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_text_names_nothing_outside_the_repository(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not BANNED_TEXT.search(text)


def test_banned_text_would_be_seen() -> None:
    assert BANNED_TEXT.search("see .." + "/shared/x") and BANNED_TEXT.search("cd /" + "work/main")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_has_a_theme_and_says_it(path: Path) -> None:
    assert path.stem not in THEMELESS
    doc = ast.get_docstring(parsed(path))
    assert doc and len(doc.split()) >= 4, "a module opens with what it is for"


@pytest.mark.parametrize(
    "path", [p for p in MODULES if p.parts[len(ROOT.parts)] in ("spec", "impl")], ids=name_of
)
def test_public_names_are_documented_and_functions_fit_in_mind(path: Path) -> None:
    tree = parsed(path)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    bare = [
        node.name
        for node in tree.body
        if isinstance(node, kinds)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
        # a kernel is described where its launcher and its plain twin are
        and not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    assert not bare, "public without a docstring"
    long = [
        f"{node.name}: {node.end_lineno - node.lineno} lines"
        for node in ast.walk(tree)
        if isinstance(node, kinds[:2]) and (node.end_lineno or 0) - node.lineno > LONGEST_FUNCTION_LINES
    ]
    assert not long


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    assert not violations(path, imported_by(path))


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("spec/x.py", "torch"),
        ("spec/x.py", "z3"),
        ("spec/x.py", "spec.prove.engine"),
        ("spec/x.py", "impl.kernels"),
        ("spec/prove/x.py", "hypothesis"),
        ("impl/x.py", "props.profiles"),
        ("impl/x.py", "spec.policies"),
        ("props/x.py", "tests.conftest"),
    ],
)
def test_a_wrong_import_would_be_seen(place: str, name: str) -> None:
    assert len(violations(ROOT / place, {name})) >= 1


def test_right_imports_are_let_through() -> None:
    assert not violations(ROOT / "spec/prove/x.py", {"z3", "cvc5", "spec.arith"})
    assert not violations(ROOT / "impl/x.py", {"torch", "triton", "spec.arith", "spec.config"})
    relative = ast.parse("from . import a\nfrom ..arith import b\n")
    resolved = {"spec.prove", "spec.prove.a", "spec.arith", "spec.arith.b"}
    assert set(imports(relative, "spec.prove.x", package=False)) == resolved


def test_no_module_is_dead() -> None:
    """Each module of spec and impl is imported by another one, or can be run."""
    used: set[str] = set()
    for path in MODULES:
        used |= imported_by(path) - {name_of(path)}
    dead = []
    for path in MODULES:
        package = path.relative_to(ROOT).parts[0]
        runnable = path.name in ("__init__.py", "__main__.py") or '__name__ == "__main__"' in path.read_text()
        if package in ("spec", "impl") and not runnable and name_of(path) not in used:
            dead.append(name_of(path))
    assert not dead


BLOCKED = ("torch", "triton", "vllm", "z3", "cvc5", "hypothesis", "pytest", "numpy", "impl", "props", "tests")


def test_spec_runs_from_the_tree_without_solvers_torch_or_installation(tmp_path: Path) -> None:
    """Every module of spec outside spec.prove imports with nothing but the tree and networkx."""
    names = [name_of(p) for p in MODULES if name_of(p).startswith("spec") and ".prove" not in name_of(p)]
    names = [n for n in names if not n.endswith("__main__")]
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"for name in {BLOCKED!r}: sys.modules[name] = None\n"
        f"import importlib\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"assert sys.modules['spec'].__file__ == {str(ROOT / 'spec' / '__init__.py')!r}\n"
        f"print(len({names!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(names) > 5
