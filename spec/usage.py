"""Command lines: bad usage is one line on standard error and exit code 2."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports bad usage in one line; ``--help`` has the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with code 2."""
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
        self.exit(2, f"{self.prog}: {shown} (--help shows the usage)\n")
