"""Where comments and documents name a function of a release or of this repository, it is there.

The releases' part needs 0.33.0 in the cache directory (``python -m impl.upstream fetch 0.33.0``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from impl.upstream.env import Unavailable, prepared

ROOT = Path(__file__).parents[1]
PLACE = re.compile(r"([\w./]*\w\.py)::([A-Za-z_][\w.]*)")  # a file and a name in it
METHOD = re.compile(r"``([A-Z]\w+)\.([a-z_]\w+)(?:\(\))?``")  # a class and a name in it, without a file


def texts(*folders: str) -> dict[Path, str]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))]
    return {path: path.read_text(encoding="utf-8") for path in paths if path.suffix in (".py", ".md")}


def sources(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): p.read_text(encoding="utf-8") for p in root.rglob("*.py")}


def defines(source: str, name: str) -> bool:
    """Whether a name is defined in a source: function, class, variable or attribute."""
    return bool(re.search(rf"(?:def|class) {name}\b|^\s*(?:self\.)?{name}\b[^=\n]*[:=]", source, re.M))


def wrong(text: str, known: dict[str, str]) -> Iterator[str]:
    """Citations of a text that lead nowhere in the known sources."""
    for path, name in PLACE.findall(text):
        path = path.lstrip("./")
        found = [source for at, source in known.items() if at == path or at.endswith("/" + path)]
        if not any(defines(source, name.split(".")[-1]) for source in found):
            yield f"{path}::{name}"
    for owner, name in METHOD.findall(text):
        found = [source for source in known.values() if re.search(rf"class {owner}\b", source)]
        if not any(re.search(rf"\b{name}\b", source) for source in found):
            yield f"{owner}.{name}"


def test_a_wrong_citation_is_found() -> None:
    known = {"vllm/v1/core/pool.py": "class Pool:\n    def take(self):\n        self.free: list[int] = []\n"}
    right = "v1/core/pool.py::Pool.take, core/pool.py::free and ``Pool.take()``"
    assert not list(wrong(right, known))
    text = "v1/core/pool.py::Pool.give, v1/core/pond.py::take and ``Pool.gives``"
    assert list(wrong(text, known)) == ["v1/core/pool.py::Pool.give", "v1/core/pond.py::take", "Pool.gives"]


def test_citations_lead_somewhere() -> None:
    try:
        release = prepared("0.33.0")
    except Unavailable as error:
        pytest.skip(str(error))
    known = sources(release.tree.directory) | sources(ROOT)
    found = {
        str(path.relative_to(ROOT)): bad
        for path, text in texts("spec", "impl", "docs").items()
        if (bad := list(wrong(text, known)))
    }
    assert not found
