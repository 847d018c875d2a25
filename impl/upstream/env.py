"""Prepares a release in a cache directory: the Python tree of vLLM, and an environment with what it imports.

    python -m impl.upstream fetch 0.33.0 [--kernels]

The cache is ``$HYBRID_KV_CACHE``, else ``$XDG_CACHE_HOME/hybrid-kv``, else ``~/.cache/hybrid-kv``:

    env-<digest>/          a virtual environment for all releases; the digest is that of :data:`STAGES`
    releases/<release>/    ``vllm`` and its dist-info, installed from the source archive with target "empty"
    kernels-<digest>/      Triton, for running a release's kernels in its interpreter (``--kernels``, 1 GB)
    vllm/<release>/        vLLM's own cache (``VLLM_CACHE_ROOT``)

The source archive carries the whole Python part; with target "empty" nothing is compiled and no CUDA library
is needed.  Everything is built under a temporary name and renamed when complete, so that an interrupted fetch
leaves nothing that looks finished; the next one continues with the stage that was missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from impl.upstream.releases import Tree, require_known

TORCH = "torch==2.13.0"
TRITON = "triton==3.9.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# Installed in this order; each is its own pip call.  The source archive needs torch and the build tools.
STAGES: tuple[tuple[str, ...], ...] = (
    (TORCH,),
    ("setuptools>=78.1.1,<81", "setuptools_scm", "setuptools_rust", "wheel", "numpy"),
    (
        "regex",
        "psutil",
        "pyzmq",
        "msgspec",
        "pydantic>=2.12",
        "cbor2",
        "transformers>=5.16.1,<5.21",
        "aiohttp",
        "requests",
        "oss-harmony",
        "openai",
        "pillow",
        "pybase64",
        "cachetools",
        "cloudpickle",
        "uvloop",
        "py-cpuinfo",
        "prometheus_client",
        "fastapi>=0.133,<0.137",
        "partial-json-parser",
        "llguidance>=1.7,<1.8",
        "einops",
        "apache-tvm-ffi==0.1.11",
    ),
    # Its own dependencies would bring Triton (1 GB), which the scheduler side does not import.
    ("--no-deps", "xgrammar==0.2.8"),
)


#: what pip says when an index does not answer or does not have something
NOT_THERE = ("No matching distribution", "Could not find a version", "connection broken", "ConnectionError")


class Unavailable(Exception):
    """A release cannot be prepared or used here; the message is one line and names the remedy."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a child process needs to run one release."""

    tree: Tree
    python: Path
    cache: Path  # VLLM_CACHE_ROOT


def cache_directory() -> Path:
    """Where releases and their environment are kept."""
    named = os.environ.get("HYBRID_KV_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hybrid-kv"


def _environment() -> Path:
    digest = hashlib.sha256(repr((STAGES, sys.version_info[:2])).encode()).hexdigest()[:12]
    return cache_directory() / f"env-{digest}"


def _kernels() -> Path:
    # Apart from the environment: vLLM takes other branches where Triton can be imported.
    return cache_directory() / f"kernels-{hashlib.sha256(TRITON.encode()).hexdigest()[:12]}"


def prepared(release: str) -> Prepared:
    """A release that was fetched before; :class:`Unavailable` says how to fetch it."""
    require_known(release)
    directory = cache_directory() / "releases" / release
    if not directory.is_dir() or not _environment().is_dir():
        raise Unavailable(f"vllm {release} was not fetched: run `python -m impl.upstream fetch {release}`")
    return prepared_tree(Tree(release, directory, release))


def prepared_tree(tree: Tree) -> Prepared:
    """An unpacked release or checkout (:func:`releases.recognise`) in the fetched environment."""
    environment = _environment()
    if not environment.is_dir():
        raise Unavailable(
            f"the environment for vllm was not fetched: run `python -m impl.upstream fetch {tree.release}`"
        )
    root = cache_directory() / "vllm" / tree.release
    return Prepared(tree, environment / "bin" / "python", root)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another fetch into {directory}", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _pip(python: Path, arguments: list[str], what: str, extra: dict[str, str] | None = None) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    environment = {**os.environ, "PIP_NO_INPUT": "1", **(extra or {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
    said = errors[0].removeprefix("ERROR: ")[:300]
    if any(sign in done.stderr for sign in NOT_THERE):
        raise Unavailable(
            f"cannot install {what}: {said} (the package index is not reachable or lacks it: set "
            "PIP_INDEX_URL for another one, then fetch again)"
        )
    raise Unavailable(f"cannot install {what}: {said} (`{' '.join(command)}` says more)")


def _install_torch(python: Path) -> None:
    # A CPU build is a tenth of the default one on Linux; take the default where there is no other.
    with contextlib.suppress(Unavailable):
        return _pip(python, ["--retries", "1", f"{TORCH}+cpu"], "torch")
    with contextlib.suppress(Unavailable):
        return _pip(python, ["--retries", "1", "--index-url", TORCH_CPU_INDEX, TORCH], "torch")
    _pip(python, [TORCH], "torch")


def _build_environment(target: Path) -> None:
    # Kept under its temporary name between stages: pip continues where an interrupted fetch stopped.
    building = target.with_name(f".{target.name}.partial")
    python = building / "bin" / "python"
    if not python.exists():
        shutil.rmtree(building, ignore_errors=True)
        made = subprocess.run([sys.executable, "-m", "venv", str(building)], capture_output=True, text=True)
        if made.returncode:
            said = (made.stdout + made.stderr).strip().splitlines() or ["no message"]
            raise Unavailable(f"cannot make a virtual environment with {sys.executable}: {said[0]}")
    for number, stage in enumerate(STAGES):
        mark = building / f".stage-{number}"
        if mark.exists():
            continue
        if stage == (TORCH,):
            _install_torch(python)
        else:
            _pip(python, list(stage), f"what vllm imports ({stage[-1]} and others)")
        mark.touch()
    building.rename(target)


def _build_tree(release: str, target: Path, python: Path) -> None:
    building = target.with_name(f".{release}.partial")
    shutil.rmtree(building, ignore_errors=True)
    building.parent.mkdir(parents=True, exist_ok=True)
    _pip(
        python,
        [
            "--no-deps",
            "--no-build-isolation",
            "--no-binary",
            "vllm",
            "--no-compile",
            "--target",
            str(building),
            f"vllm=={release}",
        ],
        f"vllm {release}",
        # The override keeps pip from refusing the "+empty" that the build would append to the version.
        {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": release},
    )
    building.rename(target)


def with_kernels(use: Prepared) -> dict[str, str]:
    """Environment of a child that runs kernels; :class:`Unavailable` if Triton was not fetched."""
    directory = _kernels()
    if not directory.is_dir():
        raise Unavailable(
            f"Triton was not fetched: run `python -m impl.upstream fetch {use.tree.release} --kernels`"
        )
    made = variables(use)
    return made | {
        "PYTHONPATH": os.pathsep.join((made["PYTHONPATH"], str(directory))),
        "TRITON_INTERPRET": "1",
    }


def fetch(release: str, kernels: bool = False) -> Prepared:
    """Prepare a release, or find it prepared; :class:`Unavailable` if the registry does not answer."""
    require_known(release)
    root = cache_directory()
    with _locked(root):
        environment = _environment()
        if not environment.is_dir():
            print(f"preparing {environment} (about 1.3 GB, a minute)", file=sys.stderr)
            _build_environment(environment)
        tree = root / "releases" / release
        if not tree.is_dir():
            print(f"preparing {tree} (about 60 MB)", file=sys.stderr)
            _build_tree(release, tree, environment / "bin" / "python")
        triton = _kernels()
        if kernels and not triton.is_dir():
            print(f"preparing {triton} (about 1 GB)", file=sys.stderr)
            building = triton.with_name(f".{triton.name}.partial")
            shutil.rmtree(building, ignore_errors=True)
            python = environment / "bin" / "python"
            _pip(python, ["--no-deps", "--no-compile", "--target", str(building), TRITON], "triton")
            building.rename(triton)
    return prepared(release)


def variables(use: Prepared) -> dict[str, str]:
    """Environment of a child process, and why each variable is there."""
    repository = Path(__file__).resolve().parents[2]
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", "PYTHON", "CUDA_")) and name not in ("VIRTUAL_ENV",)
    }
    return inherited | {
        # Not sys.path alone: vLLM inspects a model class in a subprocess of its own.
        "PYTHONPATH": os.pathsep.join((str(use.tree.directory), *_metadata(use), str(repository))),
        "PYTHONSAFEPATH": "1",  # not the current directory: it may be a checkout with a ``vllm`` of its own
        "PYTHONHASHSEED": "0",  # sets are iterated: without it the same run differs from process to process
        "PYTHONPYCACHEPREFIX": str(use.cache / "pyc"),  # nothing is written into a checkout
        "VLLM_CACHE_ROOT": str(use.cache),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "CUDA_VISIBLE_DEVICES": "",  # set and empty: no driver is looked for
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def _metadata(use: Prepared) -> tuple[str, ...]:
    """A path with a dist-info for a tree that carries none (a checkout): vLLM asks for its own version."""
    if any(use.tree.directory.glob("vllm-*.dist-info")):
        return ()
    directory = use.cache / "metadata"
    info = directory / f"vllm-{use.tree.release}.dist-info"
    if not (info / "METADATA").exists():
        info.mkdir(parents=True, exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {use.tree.release}\n"
        (info / "METADATA").write_text(text)
    return (str(directory),)
