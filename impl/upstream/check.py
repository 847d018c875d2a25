"""``python -m impl.upstream check``: drive a release through its cases and give a verdict for each invariant.

A case *holds*, is *refuted* with a reduced run, or is *undetermined*: something that its configuration
permits did not happen.  An invariant holds with the number of times its antecedent was true, or was *not
exercised* in the cases that ran.  Only a broken consequence refutes; a broken discipline is reported beside
it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from impl.upstream import kernels, worker_order
from impl.upstream.cases import Case
from impl.upstream.drive import Choices, generated, required, walked
from impl.upstream.edits import Function, known_edits
from impl.upstream.policy import Release
from impl.upstream.record import HOLDS, KERNEL, REFUTED, UNDETERMINED, Remark
from impl.upstream.releases import counted, package_of
from spec import render, script
from spec.config import Config, ConfigError
from spec.reduce import reduce, replay, replay_made
from spec.rules import RULES
from spec.world import Breach, World

NOT_EXERCISED = "not exercised"
EXAMPLES = 8  # Hypothesis' share of a case's runs


@dataclass(slots=True)
class Refutation:
    """The first run of a case that broke a rule, reduced."""

    rule: str
    text: str
    choices: Choices
    disciplines: tuple[str, ...]
    functions: tuple[str, ...] = ()
    edited: tuple[str, ...] = ()  # functions that the checkout's author edited, called in the run
    drawn: str = ""  # the timeline


@dataclass(slots=True)
class CaseResult:
    """What a case's runs add up to."""

    case: str
    config: str
    refused: str = ""  # why the release cannot be given this configuration
    runs: int = 0
    choices: int = 0
    steps: int = 0
    seconds: float = 0.0
    tally: dict[str, list[int]] = field(default_factory=lambda: {rule.name: [0, 0] for rule in RULES})
    seen: Counter[str] = field(default_factory=Counter)
    required: tuple[str, ...] = ()
    refuted: dict[str, Refutation] = field(default_factory=dict)
    disciplines: dict[str, str] = field(default_factory=dict)
    stopped: bool = False  # by Ctrl-C, before all runs

    @property
    def missing(self) -> list[str]:
        """What the configuration permits and did not happen."""
        return [name for name in self.required if not self.seen[name]]

    @property
    def verdict(self) -> str:
        """Refuted, holds, or undetermined: refused, stopped, or something permitted did not happen."""
        if self.refuted:
            return REFUTED
        return UNDETERMINED if self.refused or self.stopped or self.missing else HOLDS

    def add(self, config: Config, world: World) -> None:
        """Count one run."""
        self.runs += 1
        self.choices += world.choices
        for name, (no, yes) in world.tally.items():
            self.tally[name][0] += no
            self.tally[name][1] += yes
        for name, count in required(config).items():
            self.seen[name] += count(world)
        for breach in world.disciplines:
            self.disciplines.setdefault(breach.rule, breach.text)


def run_case(
    case: Case,
    release: Release,
    *,
    runs: int | None = None,
    choices: int | None = None,
    seed: int = 0,
    reducing: bool = True,
    known: Sequence[Choices] = (),
    say: Callable[[str], None] = lambda text: None,
) -> CaseResult:
    """All runs of one case, the ``known`` ones first.  Each rule that breaks is reduced once.

    Ctrl-C ends it with what was found until then.
    """
    config = case.load()
    policy = release.changed(*case.repairs) if case.repairs else release
    result = CaseResult(case.name, config.name, required=tuple(required(config)))
    began, asked = time.perf_counter(), policy.steps

    def seen(world: World, made: Choices) -> None:
        result.add(config, world)
        verdict = world.verdict
        if verdict is None or verdict.rule in result.refuted:
            return
        result.refuted[verdict.rule] = Refutation(verdict.rule, verdict.text, made, ())

    try:
        own = tuple(script.parse(line) for line in case.run)
        for told in (own, *known) if own else known:
            seen(*replay_made(config, policy, told))
        for number in range(runs or case.runs):
            seen(*walked(config, policy, seed, number, choices or case.choices, case.limits))
        generated(config, policy, seed, EXAMPLES, (choices or case.choices) // 2, case.limits, seen)
    except ConfigError as error:
        result.refused = str(error)
    except KeyboardInterrupt:
        result.stopped = True
    result.steps = policy.steps - asked
    result.seconds = time.perf_counter() - began
    try:
        for rule, found in list(result.refuted.items()) if reducing and not result.stopped else ():
            say(f"  {case.name}: {rule} broken; reducing {choices_of(found)}")
            result.refuted[rule] = reduced(config, policy, found)
    except KeyboardInterrupt:
        result.stopped = True
    return result


def choices_of(found: Refutation) -> str:
    """How long its run is."""
    return counted(len(found.choices), "choice", "choices")


def reduced(config: Config, policy: Release, found: Refutation) -> Refutation:
    """The same refutation with as few choices as the reducer finds, drawn, and who decided."""
    short = reduce(config, policy, found.choices, found.rule)
    ran(policy)
    world = replay(config, policy, short, record=True)
    verdict = world.verdict or next(b for b in world.disciplines if b.rule == found.rule)
    drawn = render.text(config, f"vllm {policy.child.release}", world.events)
    edited = tuple(map(str, ran(policy)))
    return Refutation(
        verdict.rule,
        verdict.text,
        short,
        tuple(breach.rule for breach in world.disciplines),
        tuple(
            f"{line}{' (edited)' if line.endswith(edited) else ''}"
            for line in decided_by(policy, config, world)
        ),
        edited,
        drawn,
    )


#: kind of decision -> upstream functions that took it
DECIDES = {
    "alloc": ("v1/core/block_pool.py", "BlockPool.get_new_blocks"),
    "adopt": (
        "v1/core/single_type_kv_cache_manager.py",
        "SingleTypeKVCacheManager.add_local_computed_blocks",
    ),
    "move": ("v1/core/single_type_kv_cache_manager.py", "MambaManager._relocate_speculative_block"),
    "drop": ("v1/core/block_pool.py", "BlockPool.free_blocks"),
    "publish": ("v1/core/single_type_kv_cache_manager.py", "SingleTypeKVCacheManager.cache_blocks"),
    "evict": ("v1/core/block_pool.py", "BlockPool._maybe_evict_cached_block"),
    "copy": ("v1/core/single_type_kv_cache_manager.py", "SingleTypeKVCacheManager._apply_cow"),
    "hit": ("v1/core/kv_cache_manager.py", "KVCacheManager.get_computed_blocks"),
    "row": ("v1/core/sched/scheduler.py", "Scheduler.schedule"),
    "preempt": ("v1/core/sched/scheduler.py", "Scheduler._preempt_request"),
    "tokens": ("v1/core/sched/scheduler.py", "Scheduler.update_from_output"),
    "finish": ("v1/core/sched/scheduler.py", "Scheduler._free_request"),
    "job": (
        "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py",
        "OffloadingConnectorScheduler.build_connector_meta",
    ),
    "look": ("v1/kv_offload/cpu/manager.py", "CPUOffloadingManager.lookup"),
    "tier": ("v1/kv_offload/cpu/manager.py", "CPUOffloadingManager.prepare_store"),
    "unfence": (
        "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py",
        "OffloadingConnectorScheduler.update_connector_output",
    ),
}
#: operation of a program -> what fixes its place
ORDERS = {
    "Zero": worker_order.Does.ZERO,
    "Wait": worker_order.Does.FLUSH,
    "Begin": worker_order.Does.SUBMIT_STORES,
    "CopyPage": worker_order.Does.COPY_BLOCKS,
    "PreProcess": worker_order.Does.PRECOPY,
    "PostProcess": worker_order.Does.POSTPROCESS,
}


def ran(policy: Release) -> list[Function]:
    """The functions that the checkout's author edited and that were called since the last time."""
    edits = known_edits(policy.child.tree, policy.child.release)
    if not edits:
        return []
    called = policy.child.ask("watch", functions=[[one.path, one.name] for one in edits])["called"]
    return [one for one in edits if [one.path, one.name] in called]


def decided_by(policy: Release, config: Config, world: World) -> Iterator[str]:
    """Upstream functions whose decisions, and operations whose order, are in the run, each with its line."""
    package = package_of(policy.child.tree)
    for kind in dict.fromkeys(event[0] for event in world.events):
        if kind in DECIDES:
            path, function = DECIDES[kind]
            try:
                node = worker_order._function(package, path, function)
            except worker_order.Drift:
                continue
            yield f"{kind}: vllm/{path}::{function}:{getattr(node, 'lineno', 0)}"
    ran = dict.fromkeys(event[3] for event in world.events if event[0] == "exec")
    operations = [
        operation
        for last in (False, True)
        for operation in worker_order.program(
            policy.child.release, config.runner, last_rank=last, speculation=config.drafts > 0
        )
    ]
    for name in ran:
        for operation in operations:
            if ORDERS.get(name) is operation.does:
                path, function, call = operation.chain[-1]
                line = worker_order.locate(package, operation.chain[-1])
                yield f"{name}: vllm/{path}::{function}:{line} ({call})"
                break


# -- the report ----------------------------------------------------------------------------------------------


def rule_verdicts(results: Sequence[CaseResult]) -> dict[str, tuple[str, int]]:
    """Verdict and antecedent count of each invariant over all cases."""
    verdicts = {}
    for rule in RULES:
        applied = sum(result.tally[rule.name][1] for result in results)
        broken = any(rule.name in result.refuted for result in results)
        broken |= rule.kind == "discipline" and any(rule.name in r.disciplines for r in results)
        verdicts[rule.name] = (REFUTED if broken else HOLDS if applied else NOT_EXERCISED, applied)
    return verdicts


def report(
    results: Sequence[CaseResult],
    briefly: Container[tuple[str, str]] = frozenset(),
    interpreted: Sequence[kernels.Row] = (),
) -> Iterator[str]:
    """The text that a check ends with; refutations (case, rule) named in ``briefly`` are not drawn.
    ``interpreted`` are the outcomes of kernel scenarios."""
    for result in results:
        for found in result.refuted.values():
            if (result.case, found.rule) in briefly:
                continue
            yield ""
            yield f"{result.case}: consequence {found.rule} refuted in {choices_of(found)}"
            yield from ("  " + script.line(choice) for choice in found.choices)
            yield ""
            yield from found.drawn.splitlines()
            yield f"both values: {found.text}"
            yield from ("edited, and called in this run: " + line for line in found.edited)
            yield from ("decided by " + line for line in found.functions)
    shown = [row for row in interpreted if row.verdict == REFUTED and (row.name, KERNEL) not in briefly]
    for row in shown:
        yield ""
        yield f"{row.name}: refuted by the tree's own kernels, interpreted"
        yield f"both values: {row.seen}"
        yield from ("edited: " + line for line in row.edited)
    names = [result.case for result in results] + [row.name for row in interpreted]
    wide = 2 + max(map(len, names), default=18)
    yield ""
    yield f"{'case':<{wide}}{'verdict':<14}{'runs':>6}{'choices':>9}{'steps':>8}{'steps/s':>9}  seen"
    for result in results:
        rate = result.steps / max(result.seconds, 1e-9)
        seen = ", ".join(f"{name} {result.seen[name]}" for name in result.required)
        yield (
            f"{result.case:<{wide}}{result.verdict:<14}{result.runs:>6}{result.choices:>9}{result.steps:>8}"
            f"{rate:>9.0f}  {result.refused or seen or '-'}"
        )
        if result.missing and not result.refuted and not result.refused:
            yield f"{'':<{wide}}permitted, but did not happen: {', '.join(result.missing)}"
    for row in interpreted:
        yield f"{row.name:<{wide}}{row.verdict:<14}{'shown above' if row in shown else row.seen}"
    yield ""
    yield f"{'invariant':<34}{'kind':<13}{'verdict':<15}{'applied':>10}"
    verdicts = rule_verdicts(results)
    for rule in RULES:
        verdict, applied = verdicts[rule.name]
        yield f"{rule.name:<34}{rule.kind:<13}{verdict:<15}{applied:>10}"
    idle = [name for name, (verdict, _) in verdicts.items() if verdict == NOT_EXERCISED]
    if idle:
        yield f"not exercised by these cases: {', '.join(idle)}"


def overall(results: Sequence[CaseResult], interpreted: Sequence[kernels.Row] = ()) -> str:
    """The verdict of a check; cases that a release cannot be given do not count."""
    verdicts = {result.verdict for result in results if not result.refused}
    verdicts |= {row.verdict for row in interpreted}
    if REFUTED in verdicts:
        return REFUTED
    return HOLDS if verdicts == {HOLDS} else UNDETERMINED


def exit_code(results: Sequence[CaseResult], remarks: Sequence[Remark]) -> int:
    """1 for a refutation that is not recorded, else 3 if something is undetermined that should not be."""
    codes = {remark.code for remark in remarks}
    if results and all(result.refused for result in results):
        codes.add(3)  # nothing was driven
    return 1 if 1 in codes else 3 if 3 in codes else 0


def as_json(
    results: Sequence[CaseResult],
    remarks: Sequence[Remark],
    release: str,
    seed: int,
    stopped: bool,
    interpreted: Sequence[kernels.Row] = (),
) -> dict[str, Any]:
    """The machine-readable report."""
    return {
        "release": release,
        "seed": seed,
        "verdict": overall(results, interpreted),
        "as_recorded": all(remark.same for remark in remarks),
        "stopped": stopped,
        "record": [{"case": r.case, "text": r.text, "as_recorded": r.same} for r in remarks],
        "invariants": {
            name: {"verdict": verdict, "applied": applied}
            for name, (verdict, applied) in rule_verdicts(results).items()
        },
        "cases": {result.case: plain(result) for result in results},
        "kernels": {row.name: {"verdict": row.verdict, "seen": row.seen} for row in interpreted},
    }


def plain(result: CaseResult) -> dict[str, Any]:
    """One case's result as plain data."""
    return {
        "config": result.config,
        "verdict": result.verdict,
        "refused": result.refused,
        "runs": result.runs,
        "choices": result.choices,
        "steps": result.steps,
        "seconds": round(result.seconds, 2),
        "seen": {name: result.seen[name] for name in result.required},
        "disciplines": result.disciplines,
        "refuted": {rule: refutation(found) for rule, found in result.refuted.items()},
    } | ({"stopped": True} if result.stopped else {})


def refutation(found: Refutation) -> dict[str, Any]:
    """One refutation as plain data."""
    return {
        "text": found.text,
        "choices": lines(found.choices),
        "disciplines": list(found.disciplines),
        "functions": list(found.functions),
    } | ({"edited": list(found.edited)} if found.edited else {})


def lines(choices: Choices) -> list[str]:
    """Choices as a script."""
    return [script.line(choice) for choice in choices]


def breaks_again(config: Config, policy: Release, choices: Sequence[str]) -> Breach | None:
    """The verdict of a recorded run, replayed."""
    return replay(config, policy, [script.parse(line) for line in choices]).verdict
