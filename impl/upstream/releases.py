"""Which releases of vLLM this adapter knows, and which of them a directory is.

An adapter fits a release by the signatures it calls and the fields it reads, not by the version number: a
checkout with changed function bodies is exactly what an author wants checked.  ``signatures.json`` holds, for
each known release, a short digest of every such signature; a tree matches a release if all of them agree.

    python -m impl.upstream.releases DIR            which release a directory matches
    python -m impl.upstream.releases --record X DIR record (or replace) a release's digests
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from spec.outputs import write_whole
from spec.usage import OneLineParser, command

KNOWN = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")

SIGNATURES = Path(__file__).with_name("signatures.json")

_OFFLOAD = "distributed/kv_transfer/kv_connector/v1/offloading"

# What the adapter constructs, calls, wraps or reads: path -> "Class" (its fields), "Class.method" or
# "function".
READ = {
    "v1/core/sched/scheduler.py": (
        "Scheduler.__init__",
        "Scheduler.schedule",
        "Scheduler.update_from_output",
        "Scheduler.update_draft_token_ids",
        "Scheduler.add_request",
        "Scheduler.finish_requests",
        "Scheduler.reset_prefix_cache",
        "Scheduler.has_requests",
    ),
    "v1/core/sched/async_scheduler.py": ("AsyncScheduler.__init__",),
    "v1/core/sched/output.py": ("SchedulerOutput", "CachedRequestData", "NewRequestData"),
    "v1/core/kv_cache_manager.py": (
        "KVCacheManager.__init__",
        "KVCacheManager.get_computed_blocks",
        "KVCacheManager.take_boundary_state_offloads",
    ),
    "v1/core/kv_cache_utils.py": (
        "get_request_block_hasher",
        "resolve_kv_cache_block_sizes",
        "init_none_hash",
    ),
    "v1/core/block_pool.py": (
        "BlockPool.get_new_blocks",
        "BlockPool.free_blocks",
        "BlockPool.touch",
        "BlockPool.cache_full_blocks",
        "BlockPool.cache_partial_block",
        "BlockPool.move_block_hashes",
    ),
    "v1/core/single_type_kv_cache_manager.py": (
        "register_all_kvcache_specs",
        "SingleTypeKVCacheManager.__init__",
    ),
    "v1/kv_cache_interface.py": (
        "AttentionSpec",
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "ChunkedLocalAttentionSpec",
        "MambaSpec",
        "KVCacheTensor",
        "KVCacheGroupSpec",
        "KVCacheConfig",
    ),
    "v1/outputs.py": ("ModelRunnerOutput", "KVConnectorOutput", "DraftTokenIds"),
    "v1/kv_offload/cpu/manager.py": (
        "CPUOffloadingManager.__init__",
        "CPUOffloadingManager.lookup",
        "CPUOffloadingManager.prepare_load",
        "CPUOffloadingManager.complete_load",
        "CPUOffloadingManager.prepare_store",
        "CPUOffloadingManager.complete_store",
    ),
    f"{_OFFLOAD}/scheduler.py": (
        "OffloadingConnectorScheduler.__init__",
        "TransferJobStatus",
        "RequestGroupState",
        "RequestOffloadState",
    ),
    f"{_OFFLOAD}/common.py": ("TransferJob", "OffloadingConnectorMetadata", "OffloadingWorkerMetadata"),
    "distributed/kv_transfer/kv_connector/utils.py": (
        "KVOutputAggregator.__init__",
        "KVOutputAggregator.aggregate",
    ),
    "v1/worker/gpu/block_table.py": ("BlockTables.__init__", "BlockTables.gather_block_tables"),
    "v1/worker/gpu/model_states/mamba_hybrid.py": (
        "MambaHybridModelState.add_request",
        "MambaHybridModelState.initialize_kv_cache",
        "MambaHybridModelState.preprocess_state",
        "MambaHybridModelState.postprocess_state",
    ),
    "v1/worker/mamba_utils.py": (
        "precopy_mamba_align_fused_kernel",
        "postprocess_mamba_fused_kernel",
        "preprocess_mamba",
    ),
    "v1/worker/gpu/pp_utils.py": ("PPHandler.receive",),
}


class UnknownRelease(Exception):
    """A release or a directory that the adapter does not fit; the message says what is known instead."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A vLLM source tree and the release whose signatures it has."""

    release: str
    directory: Path  # holds the package ``vllm``
    version: str | None  # what the tree says of itself, if anything


def counted(number: int, one: str, many: str) -> str:
    """``1 case`` or ``2 cases``."""
    return f"{number} {one if number == 1 else many}"


def require_known(release: str) -> str:
    """The release, or :class:`UnknownRelease` naming the known ones."""
    if release not in KNOWN:
        raise UnknownRelease(
            f"vllm {release or repr(release)} is not a known release; known: {', '.join(KNOWN)}"
        )
    return release


def _definition(
    module: ast.Module, name: str
) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | None:
    body: list[ast.stmt] = module.body
    found: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | None = None
    for part in name.split("."):
        found = next(
            (
                node
                for node in body
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name == part
            ),
            None,
        )
        if found is None:
            return None
        body = found.body
    return found


def _signature(definition: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(definition, ast.ClassDef):
        fields = [
            f"{line.target.id}{'?' if line.value is not None else ''}"
            for line in definition.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        ]
        return ",".join(fields)
    arguments = definition.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    stars = [f"*{argument.arg}" for argument in (arguments.vararg, arguments.kwarg) if argument]
    return ",".join(names + stars) + f";{len(arguments.defaults)}"


def digests(package: Path) -> dict[str, str]:
    """Digest of every signature in :data:`READ`, by ``path::name``; ``absent`` where there is none."""
    result = {}
    for path, names in READ.items():
        source = package / path
        try:
            module = ast.parse(source.read_text(encoding="utf-8")) if source.exists() else ast.Module([], [])
        except (SyntaxError, ValueError) as error:
            raise UnknownRelease(f"{source} is not Python: {error}") from None
        for name in names:
            definition = _definition(module, name)
            text = None if definition is None else _signature(definition)
            result[f"{path}::{name}"] = (
                "absent" if text is None else hashlib.sha256(text.encode()).hexdigest()[:12]
            )
    return result


def recorded() -> dict[str, dict[str, str]]:
    """The digests of the known releases."""
    loaded: dict[str, dict[str, str]] = json.loads(SIGNATURES.read_text())
    return loaded


def package_of(directory: Path) -> Path:
    """The package ``vllm`` in an unpacked release, a checkout, or the package itself."""
    for candidate in (directory / "vllm", directory):
        if (candidate / "v1" / "core" / "sched" / "scheduler.py").exists():
            return candidate
    raise UnknownRelease(
        f"{directory} holds no vllm/v1/core/sched/scheduler.py: name an unpacked release or a checkout"
    )


def _stated_version(package: Path) -> str | None:
    for info in sorted(package.parent.glob("vllm-*.dist-info")):
        match = re.fullmatch(r"vllm-([^-+]+).*\.dist-info", info.name)
        if match:
            return match[1]
    version = package / "_version.py"
    match = (
        re.search(r"^(?:__version__|version)\b.*?['\"]([^'\"+]+)", version.read_text(), re.M)
        if version.exists()
        else None
    )
    return match[1] if match else None


def recognise(directory: Path) -> Tree:
    """Which known release a directory has the signatures of; :class:`UnknownRelease` names what differs."""
    package = package_of(directory)
    have = digests(package)
    stated = _stated_version(package)
    known = recorded()
    matches = [release for release in KNOWN if known.get(release) == have]
    if matches:
        release = stated if stated in matches else matches[-1]
        assert release is not None
        return Tree(release, package.parent.resolve(), stated)
    nearest = min(KNOWN, key=lambda release: sum(have[item] != known[release].get(item) for item in have))
    differ = [item for item in have if have[item] != known[nearest].get(item)]
    raise UnknownRelease(
        f"{directory} matches no known release ({', '.join(KNOWN)}); nearest is {nearest}, "
        f"{counted(len(differ), 'signature differs', 'signatures differ')}, first {differ[0]}"
    )


def parser() -> OneLineParser:
    """The options of this module's command line."""
    about = "which release a directory matches"
    made = OneLineParser(prog="python -m impl.upstream.releases", description=about)
    made.add_argument("directory", metavar="DIR", type=Path, help="an unpacked release or a checkout")
    made.add_argument("--record", metavar="X", help="record (or replace) the digests of this release")
    return made


@command("impl.upstream.releases")
def main(arguments: list[str]) -> int:
    """Command line of this module; see its docstring."""
    given = parser().parse_args(arguments)
    try:
        if given.record:
            known = recorded() if SIGNATURES.exists() else {}
            known[given.record] = digests(package_of(given.directory))
            write_whole(SIGNATURES, json.dumps(known, indent=1, sort_keys=True) + "\n")
            return 0
        tree = recognise(given.directory)
    except UnknownRelease as error:
        print(f"impl.upstream.releases: {error}", file=sys.stderr)
        return 2
    stated = f", calls itself {tree.version}" if tree.version else ""
    print(f"{given.directory} has the signatures of vllm {tree.release}{stated}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
