"""Command line: ``python -m impl.upstream fetch RELEASE... [--kernels]``."""

from __future__ import annotations

import argparse
import sys

from impl.upstream.env import Unavailable, fetch
from impl.upstream.releases import KNOWN, UnknownRelease


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 2 with one line on stderr where the input, a release or the registry is missing."""
    parser = argparse.ArgumentParser(prog="python -m impl.upstream")
    commands = parser.add_subparsers(dest="command", required=True)
    get = commands.add_parser("fetch", help="prepare a release of vLLM in the cache directory")
    get.add_argument("release", nargs="+", help=f"one of {', '.join(KNOWN)}")
    get.add_argument("--kernels", action="store_true", help="also Triton, to run a release's own kernels")
    given = parser.parse_args(arguments)
    try:
        for release in given.release:
            ready = fetch(release, given.kernels)
            print(f"vllm {release} is ready in {ready.tree.directory}")
    except (Unavailable, UnknownRelease) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
