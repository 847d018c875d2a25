"""Files that a command writes: refused before the work begins, and written whole or not at all."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

STDOUT = "-"
"""What ``--json`` calls standard output."""


class OutputError(ValueError):
    """A file that cannot be written; the message is the one line that is shown."""


def check_target(option: str, path: str | Path | None) -> None:
    """Refuse a target that cannot be written, before anything is computed.  Raises :class:`OutputError`.

    A file is made beside it and removed: what the folder permits is known only by trying."""
    if path is None or (option == "--json" and str(path) == STDOUT):
        return
    if not str(path):
        raise OutputError(f"{option} '': an empty name; name a file")
    if str(path) == STDOUT:
        raise OutputError(f"{option} -: only --json goes to standard output; name a file")
    try:
        target = Path(path).resolve()
        if target.is_dir():
            raise OutputError(f"{option} {path}: is a folder; name a file")
        if not target.parent.is_dir():
            raise OutputError(f"{option} {path}: its folder does not exist; make it first")
        if _written_in_place(target):
            return
        draft = _draft(target)
        draft.touch()
        draft.unlink()
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise OutputError(f"{option} {path}: cannot be written ({why}); name another") from None


def check_folder(option: str, path: str | Path | None) -> None:
    """Refuse a folder that is missing or cannot be written.  Raises :class:`OutputError`."""
    if path is None:
        return
    if not str(path):
        raise OutputError(f"{option} '': an empty name; name a folder")
    try:
        there = Path(path).is_dir()
    except OSError as error:
        raise OutputError(f"{option} {path}: cannot be read ({error.strerror}); name another") from None
    if not there:
        raise OutputError(f"{option} {path}: is no folder; make it first")
    check_target(option, Path(path) / "file")


def check_part(option: str, path: str | Path | None, part: str) -> None:
    """Refuse a document that cannot be written or has no such part.  Raises :class:`OutputError`."""
    if path is None:
        return
    check_target(option, path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise OutputError(f"{option} {path}: cannot be read ({why}); name a document") from None
    begin = text.find(f"<!-- part: {part} -->\n")
    if begin < 0 or text.find("<!-- end part -->", begin) < 0:
        raise OutputError(f"{option} {path}: has no '<!-- part: {part} -->' ... '<!-- end part -->'; add it")


def _draft(target: Path) -> Path:
    """Where a file is written before it is renamed; its name is short, whatever the target's is."""
    return target.with_name(f".{os.getpid()}.part")


def _written_in_place(target: Path) -> bool:
    """Whether the target is there and no ordinary file (``/dev/null``, a pipe): nothing may replace it."""
    return target.exists() and not target.is_file()


def write_whole(path: str | Path, text: str) -> None:
    """Write beside the target and rename, so that a stopped run leaves no half file.

    Raises :class:`OutputError`."""
    target = Path(path).resolve()
    draft = _draft(target)
    try:
        if _written_in_place(target):
            target.write_text(text, encoding="utf-8")
            return
        try:
            draft.write_text(text, encoding="utf-8", newline="\n")
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); name another") from None


def set_aside(json_path: str | Path | None) -> TextIO:
    """Standard output as it was: with ``--json -``, all that is printed from now on goes to standard error.

    :func:`spec.usage.command` puts it back."""
    out = sys.stdout
    if str(json_path) == STDOUT:
        sys.stdout = sys.stderr
    return out


def write_json(path: str | Path | None, data: Any, out: TextIO) -> None:
    """Write the report for machines, if one is wanted: to a file, or for ``-`` to ``out``.

    Raises :class:`OutputError`."""
    if path is None:
        return
    text = json.dumps(data, indent=1) + "\n"
    if str(path) == STDOUT:
        out.write(text)
    else:
        write_whole(path, text)
