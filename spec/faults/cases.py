"""Public reports of this kind of bug, and what the model lacks to show those that it cannot.

Reports that a fault of the catalogue shows are named by the fault (``Fault.cases``); every other one says in
``lacks`` what the model would need.  ``python -m spec.handbook`` writes the table into ``docs/cases.md``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """One public report.  ``what`` and ``lacks`` are empty where a fault shows it, and says what it is."""

    name: str
    url: str
    mechanism: str
    what: str = ""
    lacks: str = ""


CASES = (
    Case("vllm-42571", "https://github.com/vllm-project/vllm/issues/42571", "ownership"),
    Case("vllm-45357", "https://github.com/vllm-project/vllm/pull/45357", "ownership"),
    Case("vllm-ascend-13501", "https://github.com/vllm-project/vllm-ascend/issues/13501", "ownership"),
    Case("sglang-27038", "https://github.com/sgl-project/sglang/pull/27038", "ownership"),
    Case(
        "sglang-25805",
        "https://github.com/sgl-project/sglang/pull/25805",
        "ownership",
        ("A recycled page of one pool keeps its old pointer into another pool, which is followed later."),
        "a second pool and the map between the two; here all groups share one",
    ),
    Case("tensorrt-llm-15018", "https://github.com/NVIDIA/TensorRT-LLM/pull/15018", "ownership"),
    Case("lmcache-5090", "https://github.com/LMCache/LMCache/issues/5090", "ownership"),
    Case("1cat-vllm-249", "https://github.com/1CatAI/1Cat-vLLM/pull/249", "mtp_alias"),
    Case("vllm-51358", "https://github.com/vllm-project/vllm/pull/51358", "mtp_alias"),
    Case("lmcache-5004", "https://github.com/LMCache/LMCache/pull/5004", "mtp_alias"),
    Case(
        "vllm-55055",
        "https://github.com/vllm-project/vllm/pull/55055",
        "mtp_alias",
        "A prefill node ships what inner draft modules wrote for drafts that nobody has verified.",
        "layers of the drafter's own modules, and a second engine that takes them over",
    ),
    Case("vllm-45704", "https://github.com/vllm-project/vllm/issues/45704", "fence"),
    Case("vllm-32255", "https://github.com/vllm-project/vllm/pull/32255", "fence"),
    Case("vllm-46283", "https://github.com/vllm-project/vllm/issues/46283", "fence"),
    Case("vllm-53049", "https://github.com/vllm-project/vllm/issues/53049", "fence"),
    Case("vllm-56104", "https://github.com/vllm-project/vllm/pull/56104", "fence"),
    Case("sglang-35049", "https://github.com/sgl-project/sglang/pull/35049", "fence"),
    Case("tensorrt-llm-15546", "https://github.com/NVIDIA/TensorRT-LLM/pull/15546", "fence"),
    Case("lmcache-4826", "https://github.com/LMCache/LMCache/pull/4826", "fence"),
    Case(
        "unified-cache-management-1088",
        "https://github.com/ModelEngine-Group/unified-cache-management/pull/1088",
        "fence",
    ),
    Case(
        "aws-do-eks-84",
        "https://github.com/aws-samples/aws-do-eks/pull/84",
        "fence",
        "A producer's lease ends before the consumer begins to read.",
        "clocks: nothing expires here",
    ),
    Case("llm-d-kv-cache-504", "https://github.com/llm-d/llm-d-kv-cache/issues/504", "fence"),
    Case("vllm-backport-63", "https://github.com/wtdcode/vllm-backport/pull/63", "pp_delay"),
    Case("vllm-44697", "https://github.com/vllm-project/vllm/issues/44697", "pp_delay"),
    Case("vllm-57755", "https://github.com/vllm-project/vllm/issues/57755", "pp_delay"),
    Case("vllm-52295", "https://github.com/vllm-project/vllm/pull/52295", "pp_delay"),
    Case("vllm-28768", "https://github.com/vllm-project/vllm/pull/28768", "pp_delay"),
    Case(
        "vllm-46899",
        "https://github.com/vllm-project/vllm/pull/46899",
        "accepted_state",
        "Draft placeholders of a request that a step has passed over are taken for drafts in a later step.",
        "drafts in the scheduler's hands: here they stay with the slot until a step takes them",
    ),
    Case("vllm-51571", "https://github.com/vllm-project/vllm/issues/51571", "accepted_state"),
    Case("vllm-50021", "https://github.com/vllm-project/vllm/pull/50021", "accepted_state"),
    Case("vllm-47199", "https://github.com/vllm-project/vllm/pull/47199", "accepted_state"),
    Case("vllm-56709", "https://github.com/vllm-project/vllm/pull/56709", "coverage"),
    Case("vllm-48959", "https://github.com/vllm-project/vllm/issues/48959", "coverage"),
    Case("anemll-57", "https://github.com/Anemll/Anemll/issues/57", "coverage"),
    Case("vllm-ascend-11383", "https://github.com/vllm-project/vllm-ascend/pull/11383", "coverage"),
    Case("vllm-51150", "https://github.com/vllm-project/vllm/issues/51150", "coverage"),
    Case("vllm-53142", "https://github.com/vllm-project/vllm/issues/53142", "align_divisor"),
    Case("vllm-54076", "https://github.com/vllm-project/vllm/pull/54076", "align_divisor"),
    Case("vllm-44599", "https://github.com/vllm-project/vllm/pull/44599", "align_divisor"),
    Case("vllm-52804", "https://github.com/vllm-project/vllm/pull/52804", "align_divisor"),
    Case("vllm-43093", "https://github.com/vllm-project/vllm/issues/43093", "align_divisor"),
    Case(
        "vllm-41037",
        "https://github.com/vllm-project/vllm/issues/41037",
        "align_divisor",
        "Two engines derive different blocks from their parallel degree.",
        "a second engine",
    ),
    Case("vllm-48633", "https://github.com/vllm-project/vllm/issues/48633", "table_indexing"),
    Case(
        "vllm-42097",
        "https://github.com/vllm-project/vllm/pull/42097",
        "table_indexing",
        "Remote block ids are expanded by the local ratio of kernel blocks to logical blocks.",
        "a second engine, and kernel blocks smaller than logical ones",
    ),
    Case("vllm-37728", "https://github.com/vllm-project/vllm/pull/37728", "table_indexing"),
    Case("1cat-vllm-567", "https://github.com/1CatAI/1Cat-vLLM/issues/567", "table_indexing"),
    Case("vllm-43434", "https://github.com/vllm-project/vllm/pull/43434", "table_indexing"),
    Case("vllm-gaudi-642", "https://github.com/vllm-project/vllm-gaudi/pull/642", "table_indexing"),
    Case("vllm-ascend-15674", "https://github.com/vllm-project/vllm-ascend/pull/15674", "table_indexing"),
    Case("vllm-42947", "https://github.com/vllm-project/vllm/pull/42947", "cuda_graph_capture"),
    Case(
        "tensorrt-llm-16290",
        "https://github.com/NVIDIA/TensorRT-LLM/pull/16290",
        "cuda_graph_capture",
        "A captured graph keeps the address of a buffer that was temporary.",
        "addresses: a buffer has a name and lives for ever",
    ),
    Case("vllm-43810", "https://github.com/vllm-project/vllm/issues/43810", "cuda_graph_capture"),
    Case("nano-vllm-190", "https://github.com/GeeeekExplorer/nano-vllm/issues/190", "cuda_graph_capture"),
    Case("vllm-44868", "https://github.com/vllm-project/vllm/pull/44868", "cuda_graph_capture"),
    Case("vllm-48375", "https://github.com/vllm-project/vllm/pull/48375", "hit_lookup"),
    Case("vllm-51771", "https://github.com/vllm-project/vllm/issues/51771", "hit_lookup"),
    Case("vllm-57616", "https://github.com/vllm-project/vllm/pull/57616", "hit_lookup"),
    Case(
        "vllm-45238",
        "https://github.com/vllm-project/vllm/issues/45238",
        "hit_lookup",
        "The only state saved lies in tokens that no other request shares.",
        (
            "a rule about siblings: `resend_is_hit` judges identical prompts only, and which checkpoints "
            "to keep is no decision here"
        ),
    ),
    Case("vllm-29387", "https://github.com/vllm-project/vllm/pull/29387", "hit_lookup"),
    Case(
        "vllm-41838",
        "https://github.com/vllm-project/vllm/issues/41838",
        "hit_lookup",
        "Attention blocks go under a key before the forward that fills them.",
        (
            "nothing: this is the base design, right as long as every reader comes later in stream order "
            "(witness `hit_before_bytes`)"
        ),
    ),
    Case("vllm-46453", "https://github.com/vllm-project/vllm/issues/46453", "hit_lookup"),
    Case("vllm-43090", "https://github.com/vllm-project/vllm/issues/43090", "hit_lookup"),
    Case("vllm-57727", "https://github.com/vllm-project/vllm/issues/57727", "hit_lookup"),
    Case("vllm-53498", "https://github.com/vllm-project/vllm/issues/53498", "hit_lookup"),
    Case("vllm-39702", "https://github.com/vllm-project/vllm/issues/39702", "eviction"),
    Case(
        "sglang-27108",
        "https://github.com/sgl-project/sglang/pull/27108",
        "eviction",
        "The device copy goes although its backup failed.",
        "write-back: the host tier gets copies of blocks, never the only one",
    ),
    Case(
        "tensorrt-llm-12834",
        "https://github.com/NVIDIA/TensorRT-LLM/pull/12834",
        "eviction",
        "A block's level is taken from its position after the swap that changed it.",
        "levels of one pool; here device and host are two stores with a transfer between them",
    ),
    Case("mooncake-3996", "https://github.com/kvcache-ai/Mooncake/pull/3996", "eviction"),
    Case("lmcache-3130", "https://github.com/LMCache/LMCache/pull/3130", "eviction"),
    Case("lmcache-3884", "https://github.com/LMCache/LMCache/pull/3884", "eviction"),
    Case("vllm-39732", "https://github.com/vllm-project/vllm/issues/39732", "load_failure"),
    Case("vllm-50388", "https://github.com/vllm-project/vllm/pull/50388", "load_failure"),
    Case("vllm-52234", "https://github.com/vllm-project/vllm/issues/52234", "load_failure"),
    Case("lmcache-4991", "https://github.com/LMCache/LMCache/issues/4991", "load_failure"),
    Case("vllm-50754", "https://github.com/vllm-project/vllm/pull/50754", "load_failure"),
    Case("vllm-46014", "https://github.com/vllm-project/vllm/issues/46014", "preemption"),
    Case("vllm-52360", "https://github.com/vllm-project/vllm/issues/52360", "preemption"),
    Case("vllm-48141", "https://github.com/vllm-project/vllm/pull/48141", "preemption"),
    Case("lmcache-1361", "https://github.com/LMCache/LMCache/pull/1361", "preemption"),
    Case("vllm-49118", "https://github.com/vllm-project/vllm/issues/49118", "preemption"),
    Case(
        "vllm-10583",
        "https://github.com/vllm-project/vllm/issues/10583",
        "id_reuse",
        "A client chooses an id that is in use.",
        (
            "two live requests under one name: `arrive` refuses a live name, and keys of the model are "
            "incarnations"
        ),
    ),
    Case("kthena-1423", "https://github.com/volcano-sh/kthena/issues/1423", "id_reuse"),
    Case("tensorrt-llm-17665", "https://github.com/NVIDIA/TensorRT-LLM/issues/17665", "id_reuse"),
    Case("vllm-42655", "https://github.com/vllm-project/vllm/issues/42655", "id_reuse"),
    Case(
        "vllm-55092",
        "https://github.com/vllm-project/vllm/pull/55092",
        "event_consistency",
        "A removal event is sent when one of two copies of a hash goes.",
        "KV events",
    ),
    Case(
        "llm-d-kv-cache-680",
        "https://github.com/llm-d/llm-d-kv-cache/pull/680",
        "event_consistency",
        "A consumer of events drops a hash at the first of several removals.",
        "KV events",
    ),
    Case(
        "aibrix-2723",
        "https://github.com/vllm-project/aibrix/pull/2723",
        "event_consistency",
        "A removal by one replica deletes a prefix for all.",
        "KV events, and more than one engine",
    ),
    Case(
        "vllm-ascend-16639",
        "https://github.com/vllm-project/vllm-ascend/issues/16639",
        "event_consistency",
        "The hit counter stays zero while hits occur.",
        "metrics",
    ),
    Case("qwen38-27b-rtx3090-86", "https://github.com/syv-ai/qwen38-27b-rtx3090/issues/86", "overflow"),
    Case("vllm-50427", "https://github.com/vllm-project/vllm/issues/50427", "overflow"),
    Case("tokenspeed-501", "https://github.com/lightseekorg/tokenspeed/pull/501", "overflow"),
    Case(
        "glm-5.3-flash-exl3-2x-dgx-sparks-57",
        "https://github.com/MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks/issues/57",
        "other",
        "Six causes in a row keep tiny helper groups from offload.",
        (
            "groups that are not cached; `python -m spec.geometry` refuses the block sizes that clash, "
            "one at a time"
        ),
    ),
    Case("vllm-51113", "https://github.com/vllm-project/vllm/pull/51113", "align_divisor"),
    Case("vllm-17398", "https://github.com/vllm-project/vllm/pull/17398", "hit_lookup"),
    Case("vllm-42492", "https://github.com/vllm-project/vllm/issues/42492", "id_reuse"),
    Case("vllm-42043", "https://github.com/vllm-project/vllm/issues/42043", "preemption"),
    Case("vllm-33997", "https://github.com/vllm-project/vllm/pull/33997", "ownership"),
    Case("vllm-47728", "https://github.com/vllm-project/vllm/pull/47728", "ownership"),
    Case("vllm-47282", "https://github.com/vllm-project/vllm/issues/47282", "fence"),
    Case("vllm-ascend-16315", "https://github.com/vllm-project/vllm-ascend/issues/16315", "preemption"),
    Case("vllm-57104", "https://github.com/vllm-project/vllm/pull/57104", "preemption"),
    Case("tensorrt-llm-10875", "https://github.com/NVIDIA/TensorRT-LLM/pull/10875", "hit_lookup"),
    Case("kvcached-362", "https://github.com/ovg-project/kvcached/issues/362", "eviction"),
    Case("vllm-55600", "https://github.com/vllm-project/vllm/issues/55600", "align_divisor"),
    Case("vllm-49069", "https://github.com/vllm-project/vllm/pull/49069", "coverage"),
    Case("sglang-39846", "https://github.com/sgl-project/sglang/issues/39846", "fence"),
    Case("tokenspeed-700", "https://github.com/lightseekorg/tokenspeed/pull/700", "cuda_graph_capture"),
)
