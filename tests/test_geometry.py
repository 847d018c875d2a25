"""The geometry report: its numbers, its exits, and that its confirmations can fail."""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spec import config, gaps, geometry, lookup, never, pairs, twins
from spec.config import Config, Group, Kind
from spec.never import Never
from spec.prefix import Case, Prefix, horizon_tokens

ROOT = Path(__file__).parents[1]
MODELS = [name for name, path in config.shipped().items() if path.parent.name == "models"]


@functools.cache
def reported(name: str) -> geometry.Report:
    return geometry.report(config.named(name))


@pytest.mark.parametrize("name", MODELS)
def test_every_statement_about_a_public_model_is_confirmed(name: str) -> None:
    report = reported(name)
    assert report.confirmed
    assert report.loads.wrong is None
    for statement in report.statements:
        assert statement.confirmation.cases > 100 and statement.confirmation.tempted > 10
        assert statement.confirmation.remedy_tried and statement.confirmation.allowed


SMALL = [name for name in config.shipped() if name not in MODELS]


@pytest.mark.parametrize("name", SMALL)
def test_every_statement_about_a_walk_configuration_is_confirmed(name: str) -> None:
    assert reported(name).confirmed


def test_at_least_six_public_models_with_a_source_for_every_number() -> None:
    assert len(MODELS) >= 6
    for name in MODELS:
        deployment = config.named(name)
        keys = [key for key, _ in deployment.source]
        assert any("block_tokens" in key or key == "group.*" for key in keys), name
        if any(group.window_tokens for group in deployment.groups):
            assert any("window_tokens" in key for key in keys), name
        if deployment.drafts:
            assert any(key.startswith("speculation") or key == "group.*" for key in keys), name
        assert "cache.hash_block_tokens" in keys or "group.*" in keys, name
        if deployment.offload and deployment.offload_prompt_only:
            assert "offload.prompt_only" in keys, name
        if deployment.blocks_per_chunk > 1:
            assert "offload.blocks_per_chunk" in keys, name
        if deployment.tail_drop and deployment.offload:
            assert "cache.tail_drop" in keys, name


@pytest.mark.parametrize(
    ("name", "alignment", "local", "offload"),
    [
        ("hybrid-1616", 1616, 3232, 3232),
        ("qwen3-next-mtp", 560, 561, None),
        ("qwen3-next-mtp-offload", 560, 1120, 1120),
        ("qwen3.5-4b-fine", 16, 16, None),
        ("nemotron-3-super", 8320, 8320, None),
        ("draft-incommensurate", 13824, 13824 + 3456, None),
        ("gpt-oss", 16, 16, 64),
        ("gemma-3-27b", 16, 16, 256),
        ("jamba", 80, 80, 160),
        ("step-3.5-mtp2", 16, 32, 32),
        ("llama-4-scout", 16, 16, 256),
    ],
)
def test_alignment_and_smallest_reusable_prefix(
    name: str, alignment: int, local: int, offload: int | None
) -> None:
    report = reported(name)
    assert report.alignment_tokens == alignment
    assert (report.smallest_local_tokens, report.smallest_offload_tokens) == (local, offload)


def test_what_retention_costs_in_chunks() -> None:
    window = reported("step-3.5-mtp2").groups[1]
    assert (window.window_chunks, window.window_chunks_inside, window.extra_chunks) == (33, 34, 1)
    assert reported("gpt-oss").groups[1].extra_chunks == 0
    assert reported("gpt-oss").groups[0].extra_chunks is None, "full attention retains everything anyway"


@pytest.mark.parametrize(
    ("state_elements", "state_bytes", "token_bytes", "block"),
    [
        (32 * 128 * 128 + 5 * 8192, 2, 2 * 2 * 256 * 2, 560),  # qwen3-next-mtp.toml
        (32 * 128 * 128 + 3 * 8192, 2, 2 * 2 * 256 * 2, 544),  # the same model without drafts
        (8192 * (16 + 3), 2, 2 * 8 * 128 * 2, 80),  # jamba.toml
    ],
)
def test_computed_block_sizes(state_elements: int, state_bytes: int, token_bytes: int, block: int) -> None:
    """The formula that the sources of these files name: blocks in steps of 16 tokens that hold a state."""
    assert 16 * -(-state_elements * state_bytes // (16 * token_bytes)) == block


@pytest.mark.parametrize("name", MODELS)
def test_the_scaled_twin_keeps_the_relations(name: str) -> None:
    """What extra tokens cost, what a hit inside a chunk costs, whether the store prunes, how hits align."""
    deployment = config.named(name)
    twin = twins.scaled(deployment)
    assert lookup.fine_grained(twin) == lookup.fine_grained(deployment)
    assert [s.name for s in never.nevers(twin)] == [s.name for s in never.nevers(deployment)]
    for group, small in zip(deployment.groups, twin.groups, strict=True):
        a, b = geometry._group_row(deployment, group), geometry._group_row(twin, small)
        assert (a.extra_chunks, a.kept_blocks == a.segment_blocks) == (
            b.extra_chunks,
            b.kept_blocks == b.segment_blocks,
        )
        if a.window_chunks is not None and a.window_chunks_inside is not None:
            assert b.window_chunks is not None and b.window_chunks_inside is not None
            assert a.window_chunks_inside - a.window_chunks == b.window_chunks_inside - b.window_chunks
        assert (group.block_tokens > deployment.hash_block_tokens) == (
            small.block_tokens > twin.hash_block_tokens
        )
    assert horizon_tokens(twin) <= 200, "brute force stays a matter of seconds"


FULL, WINDOW = Group("f", Kind.FULL, 4), Group("w", Kind.WINDOW, 4, window_tokens=8)
PLAIN = Config("plain", (FULL, WINDOW), 4, offload=True)


def said(name: str, forbids: object, allow: object = None) -> Never:
    return Never(name, "local", "", "", "", forbids, allow)  # type: ignore[arg-type]


def test_a_false_never_is_contradicted_by_a_pair_of_requests() -> None:
    [found] = pairs.confirm([said("false", lambda case, hit: hit == 8)], PLAIN)
    assert not found.holds
    assert found.broken == (Case(8, 8, 8, 9, one_step=False), 8)


def test_a_never_that_nothing_could_break_is_not_confirmed() -> None:
    [found] = pairs.confirm([said("vacuous", lambda case, hit: hit < 0)], PLAIN)
    assert found.broken is None and found.tempted == 0 and not found.holds


def test_a_remedy_that_does_nothing_is_not_confirmed() -> None:
    true = said("true", lambda case, hit: hit % 4 != 0, lambda c: c)
    helped = said(
        "helped",
        true.forbids,
        lambda c: replace(c, hash_block_tokens=2, groups=(replace(FULL, block_tokens=2),)),
    )
    idle, works = pairs.confirm([true, helped], PLAIN)
    assert idle.broken is None and idle.tempted and not idle.holds
    assert works.holds and works.allowed is not None


def test_the_report_fails_if_a_statement_does() -> None:
    report = reported("nemotron-3-super")
    broken = replace(report.statements[0].confirmation, broken=(Case(1, 1, 1, 2, False), 1))
    bad = replace(report, statements=(replace(report.statements[0], confirmation=broken),))
    assert not bad.confirmed and "NOT CONFIRMED" in geometry.render(bad)
    tempted = replace(report.statements[0].confirmation, tempted=0)
    bad = replace(report, statements=(replace(report.statements[0], confirmation=tempted),))
    assert not bad.confirmed and "within reach" in geometry.render(bad)


def test_a_window_of_whole_chunks_plus_one_token_is_never_served() -> None:
    """Lookup wants three chunks of a window of 5 tokens, the store keeps two before each multiple of 8."""
    lost = Config("lost", (Group("f", Kind.FULL, 8), Group("w", Kind.WINDOW, 2, 5)), 2, offload=True)
    report = geometry.report(lost)
    assert report.smallest_offload_tokens is None and report.loads.admitted == 0
    [nothing] = [s for s in report.statements if s.about.name == "nothing"]
    assert nothing.confirmation.holds and nothing.about.remedy == "blocks_per_chunk = 3"
    assert [gap.number for gap in report.gaps] == [5]
    assert report.confirmed
    kept = replace(lost, groups=(lost.groups[0], replace(lost.groups[1], window_tokens=4)))
    assert geometry.report(kept).smallest_offload_tokens == 8


def test_a_state_of_more_tokens_than_the_hit_is_shown() -> None:
    """A full chunk that is no multiple of the Mamba chunk: evict one chunk, and a later state is loaded."""
    mixed = Config("mixed", (Group("f", Kind.FULL, 16), Group("s", Kind.MAMBA, 32)), 16, offload=True)
    report = geometry.report(mixed)
    assert report.loads.wrong is not None and "loads the state after" in report.loads.wrong[2]
    assert {gap.number for gap in report.gaps} == {7, 11, 16, 17}
    assert report.confirmed, "explained by the gap at theorem 7"
    assert not replace(report, gaps=()).confirmed
    assert "in the twin, a hit of" in geometry.render(report)


@pytest.mark.parametrize(
    ("deployment", "numbers"),
    [
        (Config("a", (FULL, Group("c", Kind.CHUNKED, 4, 6)), 4, offload=True), [1]),
        (Config("b", (FULL, Group("c", Kind.CHUNKED, 4, 8)), 4, offload=True), []),
        (Config("c", (FULL, WINDOW), 4, offload=True, blocks_per_chunk=2), [18]),
        (Config("d", (FULL, Group("s", Kind.MAMBA, 8)), 4), [11, 16, 17]),
        (
            Config(
                "e", (FULL, Group("s", Kind.MAMBA, 4)), 4, hash_lookahead_tokens=1, drafts=1, draft_modules=1
            ),
            [],
        ),
        (
            Config(
                "f", (FULL, Group("s", Kind.MAMBA, 4)), 4, hash_lookahead_tokens=1, drafts=2, draft_modules=2
            ),
            [17],
        ),
        (Config("g", (FULL, WINDOW), 4), []),
        (Config("h", (Group("f", Kind.FULL, 64), Group("w", Kind.WINDOW, 16, 33)), 16, offload=True), [5]),
        (Config("i", (Group("f", Kind.FULL, 64), Group("w", Kind.WINDOW, 16, 32)), 16, offload=True), []),
        (Config("j", (Group("f", Kind.FULL, 64), Group("w", Kind.WINDOW, 16, 30, 3)), 16, offload=True), [5]),
        (Config("k", (Group("f", Kind.FULL, 32), Group("w", Kind.WINDOW, 16, 33)), 16, offload=True), []),
    ],
    ids=lambda value: value.name if isinstance(value, Config) else None,
)
def test_which_theorems_do_not_apply(deployment: Config, numbers: list[int]) -> None:
    assert [gap.number for gap in gaps.gaps(deployment)] == numbers


def test_theorems_are_named_as_the_proofs_name_them() -> None:
    pytest.importorskip("z3")
    from spec.prove import align, coverage

    names = {theorem.number: theorem.name for theorem in (*coverage.THEOREMS, *align.THEOREMS)}
    assert {number: names.get(number) for number in gaps.THEOREMS} == gaps.THEOREMS


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spec.geometry", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_list() -> None:
    done = run("--list")
    assert done.returncode == 0 and done.stderr == ""
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(config.shipped())


def test_report_and_json(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    done = run("nemotron-3-super", "--json", str(target))
    assert done.returncode == 0 and done.stderr == ""
    assert "smallest reusable prefix, local  8320 tokens" in done.stdout
    data = json.loads(target.read_text())
    assert data["smallest_local_tokens"] == 8320 and all(n["confirmed"] for n in data["nevers"])
    assert config.parse(data["config"]["toml"]) == config.named("nemotron-3-super")
    same = run("nemotron-3-super", "--json", "-")
    assert same.returncode == 0 and json.loads(same.stdout) == data


BAD = (
    'name = "bad"\n[cache]\nhash_block_tokens = 3\n[[group]]\nname = "f"\nkind = "full"\nblock_tokens = 16\n'
)


def test_bad_input_is_one_line_and_exit_2(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(BAD)
    done = run(str(path))
    clash = "hash_block_tokens = 3 does not divide block_tokens = 16 of group 'f'"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"spec.geometry: {path}: {clash}\n"
    done = run()
    assert (done.returncode, done.stderr) == (2, "spec.geometry: name a configuration, or ask for --list\n")
    done = run("nemotron-3-super", "--json", str(tmp_path / "no" / "x.json"))
    assert done.returncode == 2
    assert (
        done.stderr
        == f"spec.geometry: --json {tmp_path}/no/x.json: its folder does not exist; make it first\n"
    )
    done = run("--colour")
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_blocks_of_16_beside_states_of_1616() -> None:
    """A pair that is far too large to try: the twin keeps the relations, and the statements are its own."""
    groups = (Group("f", Kind.FULL, 16, drafter=True), Group("s", Kind.MAMBA, 1616))
    for offload in (False, True):
        deployment = Config(
            "odd", groups, 16, offload=offload, drafts=4, draft_modules=1, tail_drop=True, pool_blocks=64
        )
        report = geometry.report(deployment)
        assert report.exhaustive and report.confirmed
        assert twins.related(report.twin) == twins.related(deployment)
        # A prompt of 32 tokens leaves the state after its last hash block but one, 16, and blocks up to 32.
        assert report.smallest_local_tokens == 32
        assert {g.number for g in report.gaps} == ({7, 11, 16, 17} if offload else {11, 16, 17})
        short = next(s for s in report.statements if s.about.name == "short prefix")
        assert short.about.remedy.startswith("a smaller hash_block_tokens") and short.confirmation.allowed
    [loads] = [
        s for s in report.statements if s.about.name == "one-step prefill" and s.about.tier == "offload"
    ]
    assert "no hit loads any state but the one kept" in loads.about.statement
    ends_there = replace(loads.about, forbids=lambda case, hit: case.one_step and hit % 6 != 0 and hit > 0)
    [false] = pairs.confirm([ends_there], report.twin)
    assert false.broken is not None, "hits do end elsewhere than at the state: theorem 7 does not apply"


@pytest.mark.parametrize("per_chunk", [16, 48, 4096])
def test_chunks_that_are_long_for_the_window(per_chunk: int) -> None:
    groups = (Group("f", Kind.FULL, 16), Group("w", Kind.WINDOW, 16, 512, 3, drafter=True))
    deployment = Config(
        "coarse",
        groups,
        16,
        offload=True,
        blocks_per_chunk=per_chunk,
        drafts=4,
        draft_modules=2,
        tail_drop=True,
    )
    twin = twins.scaled(deployment)
    assert pairs.exhaustive(twin) and twins.related(twin) == twins.related(deployment)
    assert geometry.report(deployment).confirmed


def test_too_many_pairs_are_sampled_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pairs, "MOST_TRIES", 1000)
    assert geometry.main(["gpt-oss"]) == 3
    assert "of the 40 lengths of requests up to 40 tokens, too many for all" in capsys.readouterr().out
    some = list(pairs.lengths(twins.scaled(config.named("gpt-oss")), 40))
    assert some == sorted(set(some)) and 5 < len(some) < 40 and some[0] == 1 and some[-1] <= 40


def test_the_documented_report_is_current() -> None:
    """docs/geometry.md holds the report of one model, as the command prints it (but for the time it took)."""
    text = (ROOT / "docs" / "geometry.md").read_text(encoding="utf-8")
    assert geometry.render(reported("hybrid-1616")) in text
    assert "python -m spec.geometry hybrid-1616" in text


def of(*groups: Group, hash_block_tokens: int, **settings: object) -> Config:
    made = Config("small", groups, hash_block_tokens, pool_blocks=64, **settings)  # type: ignore[arg-type]
    return config.check(made)


def full(block: int) -> Group:
    return Group(f"f{block}", Kind.FULL, block)


@pytest.mark.parametrize(
    ("deployment", "remedy"),
    [
        (of(full(2), Group("w", Kind.WINDOW, 3, 6), hash_block_tokens=1, offload=True), "blocks that divide"),
        (
            of(full(4), full(6), Group("m", Kind.MAMBA, 6), hash_block_tokens=2, offload=True),
            "smaller blocks",
        ),
        (of(full(6), Group("m", Kind.MAMBA, 4), hash_block_tokens=2, offload=True), "smaller blocks"),
        (of(full(4), Group("w", Kind.WINDOW, 4, 8), hash_block_tokens=1), "smaller blocks"),
    ],
)
def test_a_remedy_is_one_that_works(deployment: Config, remedy: str) -> None:
    """Blocks of the smallest size put hits on multiples of it, which may all lie on the grid as it was."""
    report = geometry.report(deployment)
    assert report.confirmed
    for statement in report.statements:
        if statement.about.name == "off the grid":
            assert statement.about.remedy != never.NO_REMEDY and statement.confirmation.allowed
    assert any(s.about.remedy.startswith(remedy) for s in report.statements)


def test_a_remedy_that_cannot_be_served_is_not_told() -> None:
    """Blocks of two tokens would not hold a step of four: no smaller blocks, whatever they would allow."""
    deployment = of(
        full(4), Group("m", Kind.MAMBA, 4), hash_block_tokens=4, drafts=3, draft_modules=1, offload=True
    )
    [grid] = [
        s
        for s in geometry.report(deployment).statements
        if (s.about.name, s.about.tier) == ("off the grid", "offload")
    ]
    assert grid.about.remedy == never.NO_REMEDY and grid.about.allow is None
    assert grid.confirmation.holds and not grid.confirmation.remedy_tried


@pytest.mark.parametrize(
    "deployment",
    [
        of(full(1), hash_block_tokens=1),
        of(Group("m", Kind.MAMBA, 1), hash_block_tokens=1),
        of(full(3), Group("m", Kind.MAMBA, 1), hash_block_tokens=1),
    ],
)
def test_nothing_is_said_of_units_of_one_token(deployment: Config) -> None:
    report = geometry.report(deployment)
    assert report.confirmed
    for statement in report.statements:
        assert "fewer than 1 tokens" not in statement.about.statement
        assert "multiple of 1 tokens" not in statement.about.statement
        assert "smaller hash_block_tokens" not in statement.about.remedy


def test_chunked_groups_alone_are_refused_as_history_does_not_decide() -> None:
    alone = of(Group("c", Kind.CHUNKED, 4, 2), hash_block_tokens=4)
    with pytest.raises(config.ConfigError, match="every group has kind = chunked"):
        geometry.report(alone)
    assert lookup.local_hit(alone, (frozenset(),), 5) == 4, "a hit although nothing was left"
    assert geometry.report(of(full(4), *alone.groups, hash_block_tokens=4)).confirmed


@pytest.mark.parametrize(
    ("groups", "settings", "problem"),
    [
        (
            (full(4), Group("c", Kind.CHUNKED, 4, 8)),
            {"tail_drop": True, "drafts": 1, "draft_modules": 1},
            "tail_drop = true with group 'c' of kind = chunked",
        ),
        (
            (full(8), Group("c", Kind.CHUNKED, 4, 8)),
            {},
            "block_tokens = 4 of chunked group 'c' differs from 8",
        ),
    ],
)
def test_chunked_groups_are_refused_where_their_lookup_asserts(
    groups: tuple[Group, ...], settings: dict[str, object], problem: str
) -> None:
    with pytest.raises(config.ConfigError, match=problem):
        of(*groups, hash_block_tokens=4, **settings)
    of(*groups, hash_block_tokens=4, prefix_caching=False, **settings)


def test_no_small_deployment_has_a_statement_that_is_not_confirmed() -> None:
    """Two groups of different kinds and sizes up to three tokens, with and without the tier."""
    sizes = [
        *(full(block) for block in (1, 3)),
        Group("w", Kind.WINDOW, 2, 3),
        *(Group(f"m{block}", Kind.MAMBA, block) for block in (1, 2)),
    ]
    for first, second in itertools.combinations(sizes, 2):
        if first.kind is second.kind is Kind.MAMBA:
            continue
        for offload in (False, True):
            report = geometry.report(of(first, second, hash_block_tokens=1, offload=offload))
            assert report.confirmed, geometry.render(report)


def test_the_smallest_prefix_is_found_where_the_first_request_ended_a_little_later() -> None:
    """The drafter re-reads three tokens: what lies behind a hit is registered that much later."""
    for more, smallest in (({}, 1), ({"hash_lookahead_tokens": 1}, 2)):
        deployment = of(full(1), hash_block_tokens=1, drafts=4, draft_modules=3, **more)
        assert Prefix(deployment, "local").smallest_tokens == smallest
