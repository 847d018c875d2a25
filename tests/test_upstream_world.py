"""Released vLLM as a policy of the world: what is observed is what the release holds, recorded verdicts come
again, mutants are found, bad input is one line.

Needs releases in the cache directory (``python -m impl.upstream fetch 0.33.0 0.30.0``); skipped with a reason
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from impl.upstream import __main__ as command
from impl.upstream import cases, check, matrix
from impl.upstream.cases import BY_NAME, CASES, load
from impl.upstream.child import Child
from impl.upstream.drive import Drawn, Limits, walked
from impl.upstream.env import Unavailable, prepared
from impl.upstream.policy import Release, Upstream
from spec.walk import draw_options
from spec.world import World

Plain = dict[str, Any]


def started(release: str) -> Child:
    """A release's process, or a visible skip that says how to fetch it."""
    try:
        return Child(prepared(release))
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def latest() -> Iterator[Release]:
    """The newest known release."""
    with started("0.33.0") as child:
        yield Release(child)


def disagreements(world: World) -> list[str]:
    """How the world's book differs from what the release really holds."""
    policy = world.policy
    assert isinstance(policy, Upstream)
    state: Plain = policy.ask("state")["state"]
    book = world.book
    wrong = []
    for name, groups in state["tables"].items():
        request = book.requests.get(policy.uids[name])
        ours = [list(cols) for cols in request.cols] if request else []
        for group, blocks in enumerate(groups):
            cols = ours[group] + [0] * (len(blocks) - len(ours[group])) if ours else []
            if cols[: len(blocks)] != blocks:
                wrong.append(f"{name} group {group}: {cols} but the release holds {blocks}")
    free = set(state["free"]["order"])
    if set(book.free) != free:
        wrong.append(f"free {sorted(book.free)} but the release says {sorted(free)}")
    keys = {int(block): policy.key(entries[0][0]) for block, entries in state["keys"].items()}
    if keys != book.core.key:
        wrong.append(f"keys {book.core.key} but the release says {keys}")
    tier = {policy.key(name): entry[0] for name, entry in state.get("tier", {}).items()}
    if tier != {key: chunk.place for key, chunk in book.tier.items()}:
        wrong.append(f"host chunks {book.tier} but the release says {tier}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "attention-tight",
        "hybrid-tight",
        "hybrid-async-offload",
        "hybrid-partial",
        "window-async",
        "v1-offload",
    ],
)
def test_decisions_add_up_to_what_the_release_holds(latest: Release, name: str) -> None:
    case = BY_NAME[name]
    config, random = case.load(), Random(name)
    for _ in range(3):
        world = World(config, latest)
        adversary = Drawn(config, random, draw_options(config, random), case.limits)
        for number in range(150):
            choice = adversary.draw(world)
            if choice is not None:
                world.choose(choice)
            if world.verdict:
                break
            if number % 10 == 0:
                assert disagreements(world) == []


@pytest.mark.slow
def test_a_lost_decision_is_noticed(latest: Release) -> None:
    """The comparison above can fail: one decision that is not applied shows."""
    config = load("attention")
    world = World(config, latest)
    for choice in (("arrive", "r1", "0", 9, 2), ("schedule",)):
        assert world.choose(choice)
    assert disagreements(world) == []
    block = next(iter(world.book.core.key))
    world.book.apply(("evict", block))
    assert "keys" in disagreements(world)[0]


@pytest.mark.slow
def test_the_newest_release_gives_the_recorded_verdicts(latest: Release) -> None:
    recorded = matrix.recorded()["0.33.0"]["cases"]
    for case in CASES:
        if not case.default:
            continue
        result = check.run_case(case, latest, reducing=False, known=matrix.known(case))
        assert result.verdict == recorded[case.name]["verdict"], case.name
        again(case, latest, recorded[case.name])


def again(case: cases.Case, release: Release, row: Plain) -> None:
    """Each recorded refutation of the case breaks its rule again."""
    policy = release.changed(*case.repairs) if case.repairs else release
    for rule, found in row["refuted"].items():
        breach = check.breaks_again(case.load(), policy, found["choices"])
        assert breach is not None and breach.rule == rule, (case.name, rule, breach)


@pytest.mark.slow
def test_recorded_refutations_replay_and_their_repairs_survive(latest: Release) -> None:
    recorded = matrix.recorded()["0.33.0"]["cases"]
    for case in CASES:
        again(case, latest, recorded[case.name])
    for name, repairs in REPAIRED_BY.items():
        case = BY_NAME[name]
        policy = latest.changed(*case.repairs, *repairs)
        for found in recorded[name]["refuted"].values():
            assert check.breaks_again(case.load(), policy, found["choices"]) is None, name


#: case -> repairs with which its recorded runs survive
REPAIRED_BY = {
    "short-prompt": ("padded_prompts_decode",),
    "flush-order": ("flush_before_overwriting",),
    "reused-offer": ("offers_still_held",),
    "early-boundary": ("publish_computed_boundaries",),
    "mtp-stall": ("reserve_keeps_progress",),
    "late-tail": ("tails_not_published_late",),
    "lookup-past-hashes": ("lookup_within_hashes",),
    "dense-windows": ("stale_windows_rescanned",),
    "split-divisor": ("split_by_state_block",),
}


@pytest.mark.slow
def test_an_old_release_is_refuted() -> None:
    """0.30.0 admits a hit whose retained history it did not look up."""
    recorded = matrix.recorded()["0.30.0"]["cases"]
    case = BY_NAME["retained-window"]
    with started("0.30.0") as child:
        release = Release(child)
        again(case, release, recorded[case.name])
        result = check.run_case(case, release, reducing=False)
    assert result.verdict == recorded[case.name]["verdict"] == check.REFUTED


def test_the_record_is_complete() -> None:
    """Every case has a recorded verdict for every release, and the history is in it."""
    recorded = matrix.recorded()
    for release in matrix.KNOWN:
        assert set(recorded[release]["cases"]) == set(BY_NAME)
    assert [text for text, _ in matrix.differences(recorded, recorded)] == []


@pytest.mark.slow
def test_missing_witness_leaves_a_case_undetermined(latest: Release) -> None:
    """Two choices reach no external hit: undetermined, not holding."""
    result = check.run_case(BY_NAME["attention"], latest, runs=1, choices=2, reducing=False)
    assert result.verdict == check.UNDETERMINED and "external_hit" in result.missing
    assert check.overall([result]) == (check.UNDETERMINED, 3)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["early_window_free", "key_one_token_early"])
def test_mutant_is_found(latest: Release, mutant: str) -> None:
    assert matrix.mutant_row(latest, mutant, 0, None)["verdict"] == check.REFUTED


@pytest.mark.slow
def test_same_seed_same_verdict(latest: Release) -> None:
    case = BY_NAME["hybrid-sync-pp"]
    first, second = (
        [walked(case.load(), latest, 3, number, 80, case.limits)[1] for number in range(3)] for _ in range(2)
    )
    assert first == second


def test_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(case.name in shown for case in CASES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "--release", "0.29.0"], "0.29.0 is not a known release; known: 0.30.0"),
        (["check", "--config", "nothing"], "no configuration named 'nothing'"),
        (["check", "--vllm", "/nowhere"], "name an unpacked release or a checkout"),
        (["matrix", "--releases", "0.1.0"], "0.1.0 is not a known release"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_release_that_was_not_fetched_is_one_line(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYBRID_KV_CACHE", str(tmp_path))
    assert command.main(["check", "--release", "0.33.0"]) == 2
    assert "python -m impl.upstream fetch 0.33.0" in capsys.readouterr().err


def test_limits_keep_the_adversary_within_a_release() -> None:
    """No failures are drawn; without the limit, no reset of the tier."""
    config, random = load("attention"), Random(1)
    weights = dict(Drawn(config, random, draw_options(config, random), Limits()).options.weights)
    assert weights["fail"] == 0


def test_unknown_repair_is_refused() -> None:
    with pytest.raises(ValueError, match="no mutant or repair is called 'magic'"):
        Release(object(), ("magic",))  # type: ignore[arg-type]
