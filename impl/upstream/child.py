"""The handle on a process that runs one release: one JSON line a question, one a reply.

A process of its own because two releases do not fit into one interpreter, because a wrong address in a kernel
is a segmentation fault, and because vLLM's packages stay out of this project's environment.  The questions
are those of :mod:`impl.upstream.driver`.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from impl.upstream.env import Prepared, Unavailable, variables
from spec.config import Config, ConfigError

Plain = dict[str, Any]


class Died(Exception):
    """The process ended or stopped answering; the message holds its exit status and last words."""

    def __init__(self, message: str, signalled: bool = False) -> None:
        super().__init__(message)
        self.signalled = signalled  # it ended by a signal of its own, such as a wrong address


class Child:
    """One release in a process of its own; a context manager."""

    def __init__(
        self,
        use: Prepared,
        timeout_s: float = 300.0,
        module: str = "impl.upstream.driver",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process; importing vLLM takes seconds and happens with the first ``new``.

        ``module`` answers the questions; :mod:`impl.upstream.statecopy` needs the environment of
        :func:`impl.upstream.env.with_kernels`.
        """
        self.release = use.tree.release
        self.tree = use.tree.directory
        self.timeout_s = timeout_s
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [str(use.python), "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=dict(environment) if environment is not None else variables(use),
            process_group=0,  # Ctrl-C is for this process, which then ends the child
        )

    def load(self) -> None:
        """Import the release now; :class:`Unavailable` if it cannot be, or if it is another tree."""
        try:
            reply = self.ask("load")
        except Died as died:
            reply = {"error": died}
        if "error" in reply:
            raise Unavailable(f"{self.tree} cannot be imported: {reply['error']}")
        if not Path(reply["at"]).is_relative_to(self.tree.absolute()):
            raise Unavailable(f"{reply['at']} is imported in place of {self.tree}")

    def ask(self, ask: str, **arguments: Any) -> Plain:
        """One question; :class:`Died` if the process does not answer."""
        reply: Plain = self._exchange({"ask": ask, **arguments})
        return reply

    def new(self, config: Config, patches: Sequence[str] = (), narrate: bool = False) -> Plain:
        """A fresh scheduler; :class:`ConfigError` if vLLM would not mean what the configuration says.

        ``patches`` names mutants or repairs of :mod:`impl.upstream.patches`; ``narrate`` asks for decisions
        instead of state.
        """
        reply = self.ask("new", config=asdict(config), patches=list(patches), narrate=narrate)
        if "error" in reply:
            raise ConfigError(str(reply["error"]))
        return reply

    def close(self) -> None:
        """End the process; idempotent."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # it is gone already
                self._process.stdin.close()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._stderr.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(self, question: Any) -> Any:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise self._died() from None
        ready, _, _ = select.select([process.stdout], [], [], self.timeout_s)
        if not ready:
            process.kill()
            process.wait()
            raise Died(f"vllm {self.release} did not answer in {self.timeout_s:g} s and was stopped")
        line = process.stdout.readline()
        if not line:
            raise self._died()
        return json.loads(line)

    def _died(self) -> Died:
        status = self._process.wait()
        self._stderr.seek(0)
        lines = [line for line in self._stderr.read().decode(errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else "nothing on stderr"
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return Died(f"the process of vllm {self.release} ended with {how}: {last}", status < 0)
