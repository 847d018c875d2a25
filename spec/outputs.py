"""Files that a command writes: refused before the work begins, and written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


class OutputError(ValueError):
    """A file that cannot be written; the message is the one line that is shown."""


def check_target(option: str, path: str | None) -> None:
    """Refuse a target whose folder is missing or that is a folder, before anything is computed."""
    if path is None:
        return
    target = Path(path)
    if target.is_dir():
        raise OutputError(f"{option} {path}: is a folder; name a file")
    if not target.absolute().parent.is_dir():
        raise OutputError(f"{option} {path}: its folder does not exist; make it first")
    if not os.access(target.absolute().parent, os.W_OK):
        raise OutputError(f"{option} {path}: its folder cannot be written; name another")


def write_whole(path: str | Path, text: str) -> None:
    """Write beside the target and rename, so that a stopped run leaves no half file."""
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(target)
