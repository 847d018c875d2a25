"""The coverage theorems, 0 to 10, in order."""

from spec.prove import hits, restore, spans, store
from spec.prove.theorem import Theorem

THEOREMS: tuple[Theorem, ...] = (
    spans.DIVISION,
    restore.CHUNK_COVERAGE,
    store.BLOCK_COVERAGE,
    restore.BASE_WINDOW,
    restore.IN_FLIGHT,
    store.AGREEMENT,
    hits.TAIL_DROP,
    hits.COMMON_HIT,
    hits.FREED_COLUMNS,
    spans.SPAN,
    restore.COST,
)
