"""From a configuration to vLLM's own objects: the only module that knows constructors and their signatures.

Runs inside the child process (:mod:`impl.upstream.driver`), on a machine without a GPU.  No model is loaded:
the cache groups are handed to the scheduler directly, as
``v1/engine/core.py::EngineCore._initialize_kv_caches`` does after it has asked the workers for them.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spec.config import Config, ConfigError, Group, Kind

# One page per block keeps the offload arithmetic exact: vLLM rounds a chunk's bytes up to this many.
TIER_CHUNK_BYTES = 4096
_BLOCK_BYTES = 16

# A model directory is required, its weights are not; the cache groups need not match the model.
_MODEL = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "ffn_dim": 16,
    "vocab_size": 32768,
    "max_position_embeddings": 65536,
    "word_embed_proj_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float16",
}


@dataclass(slots=True)
class Built:
    """A scheduler ready to be asked, and what the driver needs beside it."""

    scheduler: Any
    hash_block: Callable[[Any], Any] | None  # the request block hasher; None when nothing consumes hashes
    aggregator: Any  # KVOutputAggregator, or None without offload
    geometry: dict[str, Any]  # what vLLM made of the configuration, as plain data


def accepted(call: Callable[..., Any], **kwargs: Any) -> Any:
    """Call with those keywords that this release's signature knows; the others do not exist in it."""
    parameters = inspect.signature(call).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return call(**kwargs)
    return call(**{name: value for name, value in kwargs.items() if name in parameters})


def prefill_lookahead_tokens(config: Config) -> int:
    """Tokens past the computed range that the drafter reads during prefill.

    Source: ``config/vllm.py::VllmConfig.num_prefill_lookahead_tokens``, 0.33.0.
    """
    if not config.drafts or not config.draft_modules:
        return 0
    return config.drafts if min(config.draft_modules, config.drafts) > 1 else 1


def refuse_inconsistent(config: Config, lookahead_hashes: bool) -> None:
    """Raise :class:`ConfigError` where vLLM would derive another number than the configuration states."""
    lookahead_tokens = prefill_lookahead_tokens(config)
    for group in config.groups:
        if group.kind is Kind.WINDOW and group.extra_tokens != max(0, lookahead_tokens - 1):
            raise ConfigError(
                f"group {group.name}: extra_tokens is {group.extra_tokens}, but vLLM retains "
                f"{max(0, lookahead_tokens - 1)} for drafts = {config.drafts} and "
                f"draft_modules = {config.draft_modules}"
            )
    if (config.tail_drop or config.hash_lookahead_tokens) and not lookahead_tokens:
        raise ConfigError(
            f"tail_drop = {config.tail_drop}, hash_lookahead_tokens = {config.hash_lookahead_tokens}: these "
            f"need a drafter that keeps a cache; drafts = {config.drafts}, "
            f"draft_modules = {config.draft_modules}"
        )
    if config.hash_lookahead_tokens:
        if config.tail_drop:
            raise ConfigError(
                f"tail_drop and hash_lookahead_tokens = {config.hash_lookahead_tokens} replace one another"
            )
        if config.offload:
            raise ConfigError(
                f"hash_lookahead_tokens = {config.hash_lookahead_tokens}, but vLLM hashes without lookahead "
                f"when offload = true"
            )
        if not lookahead_hashes:
            raise ConfigError(
                f"hash_lookahead_tokens = {config.hash_lookahead_tokens}, but this release hashes with 0"
            )
        if config.hash_lookahead_tokens != lookahead_tokens:
            raise ConfigError(
                f"hash_lookahead_tokens is {config.hash_lookahead_tokens}, but the drafter reads "
                f"{lookahead_tokens} tokens ahead"
            )
    if config.step_tokens < config.slots:
        raise ConfigError(f"step_tokens is {config.step_tokens}, less than slots = {config.slots}")
    if config.step_tokens < 1 + config.drafts:
        # A decode is never scheduled in part, so that it would wait for ever.
        raise ConfigError(
            f"step_tokens is {config.step_tokens}, less than one decode of 1 + drafts = {1 + config.drafts}"
        )
    chunked = [group.name for group in config.groups if group.kind is Kind.CHUNKED]
    if chunked and config.tail_drop:
        raise ConfigError(f"vLLM has no tail_drop with chunked-local attention: group {chunked[0]}")
    if chunked and len({group.block_tokens for group in config.groups}) > 1:
        # ChunkedLocalAttentionManager.find_longest_cache_hit asserts it at the first look-up.
        raise ConfigError(f"vLLM has no groups of different block sizes beside chunked group {chunked[0]}")
    if config.runner == "v1" and config.drafts and config.pp > 1:
        # _build_attention_metadata reads the drafter, which only the last stage has (vllm issue 49355).
        raise ConfigError(f"runner v1 has no drafts at pp = {config.pp}; use pp = 1")
    if config.runner == "v1" and config.async_scheduling and config.pp > 1:
        raise ConfigError(f"runner v1 has no asynchronous scheduling at pp = {config.pp}; use pp = 1")


def _speculation(config: Config) -> Any:
    """Stand-in for ``SpeculativeConfig``: the questions the scheduler side asks, nothing else.

    ``draft_modules = 0`` is a drafter without a cache of its own (n-gram), 1 an EAGLE-like drafter, more a
    multi-module MTP.
    """
    if not config.drafts:
        return None
    keeps_cache = config.draft_modules > 0
    drop = keeps_cache and (config.tail_drop or config.hash_lookahead_tokens > 0)
    no = lambda: False  # noqa: E731
    return SimpleNamespace(
        method="mtp" if keeps_cache else "ngram",
        num_speculative_tokens=config.drafts,
        num_speculative_tokens_per_batch_size=None,
        max_num_new_slots_for_drafting=0,
        draft_model_config=None,
        parallel_drafting=False,
        disable_eagle_block_drop=keeps_cache and not drop,
        disable_lookahead_block_hashes=config.hash_lookahead_tokens == 0,
        use_eagle=lambda: keeps_cache,
        needs_eagle_block_drop=lambda: keeps_cache,
        use_eagle_block_drop=lambda: drop,
        use_multi_module_mtp=lambda: min(config.draft_modules, config.drafts) > 1,
        uses_draft_model=no,
        uses_dynamic_speculative_decoding=no,
        use_dflash=no,
        use_dspark=no,
        use_ngram_gpu=no,
    )


def _spec(group: Group, config: Config) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as kv

    half = torch.float16
    attention = {"block_size": group.block_tokens, "num_kv_heads": 1, "head_size": 1, "dtype": half}
    match group.kind:
        case Kind.FULL:
            return kv.FullAttentionSpec(**attention)
        case Kind.WINDOW:
            return kv.SlidingWindowSpec(
                **attention, sliding_window=group.window_tokens, extra_retained_tokens=group.extra_tokens
            )
        case Kind.CHUNKED:
            return kv.ChunkedLocalAttentionSpec(**attention, attention_chunk_size=group.window_tokens)
        case Kind.MAMBA:
            return kv.MambaSpec(
                block_size=group.block_tokens,
                shapes=((1,), (1,)),
                dtypes=(half, half),
                mamba_cache_mode="align",
                num_speculative_blocks=config.drafts,
            )


def _cache_config(config: Config, made: Any) -> Any:
    from vllm.v1 import kv_cache_interface as kv

    groups = [
        accepted(
            kv.KVCacheGroupSpec,
            layer_names=[f"layer.{index}"],
            kv_cache_spec=_spec(group, config),
            is_eagle_group=group.drafter,
        )
        for index, group in enumerate(config.groups)
    ]
    layers = [f"layer.{index}" for index in range(len(groups))]
    size = config.pool_blocks * _BLOCK_BYTES
    tensor = accepted(
        kv.KVCacheTensor, size=size, layers=layers, layer_stride=_BLOCK_BYTES, block_stride=_BLOCK_BYTES
    )
    return kv.KVCacheConfig(
        num_blocks=config.pool_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=groups,
        # The pool goes by this one, the offloading connector by that of the engine's configuration.
        prefix_cache_retention_interval=made.cache_config.prefix_cache_retention_interval,
    )


_MODEL_CONFIG: dict[int, Any] = {}


def _model_config(max_model_len: int) -> Any:
    """One per length and process: the first inspects a model class in a subprocess of its own (seconds)."""
    from vllm.config import ModelConfig

    if max_model_len not in _MODEL_CONFIG:
        directory = Path(os.environ["VLLM_CACHE_ROOT"]) / "model"
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "config.json"
        text = json.dumps(_MODEL, indent=1)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        _MODEL_CONFIG[max_model_len] = ModelConfig(
            model=str(directory),
            dtype="float16",
            seed=0,
            skip_tokenizer_init=True,
            max_model_len=max_model_len,
        )
    return _MODEL_CONFIG[max_model_len]


def _vllm_config(config: Config) -> Any:
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        SchedulerConfig,
        VllmConfig,
    )

    block_tokens = min(group.block_tokens for group in config.groups)
    transfer = None
    if config.offload:
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "cpu_bytes_to_use": config.tier_chunks * TIER_CHUNK_BYTES,
                "blocks_per_chunk": config.blocks_per_chunk,
                "offload_prompt_only": config.offload_prompt_only,
            },
        )
    # Constructed as for the v1 runner: up to 0.32.0 the validation of the v2 runner wants Triton.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    made = VllmConfig(
        model_config=_model_config(config.request_tokens),
        scheduler_config=accepted(
            SchedulerConfig,
            max_num_seqs=config.slots,
            max_num_batched_tokens=config.step_tokens,
            max_model_len=config.request_tokens,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            watermark=0.0,
        ),
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=config.prefix_caching),
        kv_transfer_config=transfer,
        device_config=DeviceConfig("cpu"),
    )
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if config.runner == "v2" else "0"
    if made.use_v2_model_runner != (config.runner == "v2"):
        raise RuntimeError(f"this release ignores VLLM_USE_V2_MODEL_RUNNER for runner = {config.runner}")
    # What a GPU platform and the model would have set, and the CPU platform overwrites.
    made.parallel_config.pipeline_parallel_size = config.pp
    made.parallel_config.tensor_parallel_size = config.tp
    made.parallel_config.world_size = config.ranks
    made.scheduler_config.async_scheduling = config.async_scheduling
    made.scheduler_config.disable_hybrid_kv_cache_manager = False
    # EngineCore sets the minimum over the prefix-cacheable groups.
    made.cache_config.block_size = block_tokens
    made.cache_config.num_gpu_blocks = config.pool_blocks
    made.cache_config.kv_cache_layout = "LBNHC"
    mamba = [group.block_tokens for group in config.groups if group.kind is Kind.MAMBA]
    if mamba:
        made.cache_config.mamba_cache_mode = "align"
        made.cache_config.mamba_block_size = mamba[0]
    if len(config.groups) > 1:
        made.cache_config.prefix_match_unit = config.hash_block_tokens
    made.speculative_config = _speculation(config)
    return made


_VLLM_CONFIGS: dict[Config, Any] = {}
_ONCE: set[str] = set()


def build(config: Config) -> Built:
    """Real objects for one configuration; raises :class:`ConfigError` where they cannot mean the same.

    The first call in a process takes seconds (imports, model inspection), later ones milliseconds.
    """
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.structured_output import StructuredOutputManager

    refuse_inconsistent(config, hasattr(VllmConfig, "num_hash_lookahead_tokens"))
    if config not in _VLLM_CONFIGS:
        _VLLM_CONFIGS[config] = _vllm_config(config)
    made = _VLLM_CONFIGS[config]
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if config.runner == "v2" else "0"
    hash_function = get_hash_fn_by_name(made.cache_config.prefix_caching_hash_algo)
    if "registered" not in _ONCE:
        register_all_kvcache_specs(made)
        kv_cache_utils.init_none_hash(hash_function)
        _ONCE.add("registered")
    cache = _cache_config(config, made)
    # The check that the engine makes at start-up: the pool holds one request of the greatest length.
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    needed_blocks = 1 + sum(-(-spec.max_memory_usage_bytes(made) // spec.page_size_bytes) for spec in specs)
    if needed_blocks > config.pool_blocks:
        raise ConfigError(
            f"pool_blocks is {config.pool_blocks}, but one request of request_tokens = "
            f"{config.request_tokens} needs {needed_blocks}, the null block included"
        )
    scheduler_block, hash_block = kv_cache_utils.resolve_kv_cache_block_sizes(cache, made)
    if (config.prefix_caching or config.offload) and hash_block != config.hash_block_tokens:
        raise ConfigError(f"hash_block_tokens is {config.hash_block_tokens}, but vLLM resolves {hash_block}")
    resolve_alignment = getattr(kv_cache_utils, "resolve_cache_hit_alignment_tokens", None)
    if resolve_alignment is not None:
        cache.hash_block_size = hash_block
        cache.cache_hit_alignment_tokens = resolve_alignment(cache, made, scheduler_block, hash_block)
    scheduler = (AsyncScheduler if config.async_scheduling else Scheduler)(
        vllm_config=made,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(made),
        block_size=scheduler_block,
        hash_block_size=hash_block,
        log_stats=False,
    )
    connector = scheduler.connector
    if config.offload:
        chunks = connector.connector_scheduler.manager._num_chunks
        if chunks != config.tier_chunks:
            raise ConfigError(f"tier_chunks is {config.tier_chunks}, but vLLM's tier has {chunks}")
    lookahead_hash_tokens = int(getattr(made, "num_hash_lookahead_tokens", 0))
    hasher = None
    if config.prefix_caching or config.offload:
        hasher = accepted(
            kv_cache_utils.get_request_block_hasher,
            **{
                "block_size": hash_block,  # its name up to 0.29.0
                "hash_block_size": hash_block,
                "caching_hash_fn": hash_function,
                "num_hash_lookahead_tokens": lookahead_hash_tokens,
            },
        )
    coordinator = scheduler.kv_cache_manager.coordinator
    geometry = {
        "scheduler_block_tokens": scheduler_block,
        "hash_block_tokens": hash_block,
        "hash_lookahead_tokens": lookahead_hash_tokens,
        "hit_alignment_tokens": getattr(cache, "cache_hit_alignment_tokens", None),
        "partial_hits": bool(getattr(coordinator, "enable_partial_hash_hits", False)),
        "drafter_groups": sorted(getattr(coordinator, "eagle_group_ids", ())),
        "split_divisor_tokens": made.cache_config.block_size,
        "mamba_block_tokens": made.cache_config.mamba_block_size,
        "lookahead_tokens": scheduler.num_lookahead_tokens,
        "prefill_lookahead_tokens": getattr(scheduler, "num_prefill_lookahead", 0),
        "concurrent_steps": made.max_concurrent_batches,
        "ranks": made.parallel_config.world_size,
        "defer_block_free": bool(getattr(scheduler, "defer_block_free", False)),
        "zeroing": bool(scheduler.needs_kv_cache_zeroing),
        "tier_chunks": config.tier_chunks if config.offload else 0,
        "retention_tokens": coordinator.retention_interval,
        "connector_retention_tokens": (
            connector.connector_scheduler.config.retention_interval if config.offload else None
        ),
        "scheduler": type(scheduler).__name__,
    }
    aggregator = KVOutputAggregator(config.ranks) if config.offload else None
    return Built(scheduler, hasher, aggregator, geometry)
