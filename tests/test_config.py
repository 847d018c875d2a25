"""Configurations: what is shipped can be served, text and data agree, and every refusal has its exact line."""

# ruff: noqa: E501 (lines that a user reads are written here whole)

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType

import pytest

from spec import config, handbook
from spec.config import Config, ConfigError, Group, Kind

# A deployment that uses every table; each refusal below changes one or two of its lines.
GOOD = """\
name = "good"
description = "one of each"

[cache]
hash_block_tokens = 4
tail_drop = true

[speculation]
drafts = 3
draft_modules = 2

[engine]
pp = 2
async_scheduling = true

[offload]
enabled = true
blocks_per_chunk = 2

[bounds]
pool_blocks = 40

[source]
"group.window" = "made up"

[[group]]
name = "full"
kind = "full"
block_tokens = 8

[[group]]
name = "window"
kind = "window"
block_tokens = 4
window_tokens = 6
extra_tokens = 2
drafter = true

[[group]]
name = "state"
kind = "mamba"
block_tokens = 8
"""


def changed(*edits: tuple[str, str], text: str = GOOD) -> str:
    """The good text with each pair's first half, which must occur, replaced by its second."""
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


def test_the_good_text_says_what_it_says() -> None:
    assert config.parse(GOOD) == Config(
        name="good",
        description="one of each",
        groups=(
            Group("full", Kind.FULL, 8),
            Group("window", Kind.WINDOW, 4, window_tokens=6, extra_tokens=2, drafter=True),
            Group("state", Kind.MAMBA, 8),
        ),
        hash_block_tokens=4,
        tail_drop=True,
        drafts=3,
        draft_modules=2,
        pp=2,
        async_scheduling=True,
        offload=True,
        blocks_per_chunk=2,
        pool_blocks=40,
        source=(("group.window", "made up"),),
    )


REFUSALS: list[tuple[str, tuple[tuple[str, str], ...], str]] = [
    # text, keys, types
    (
        "syntax",
        (("[cache]", "[cache"),),
        "not TOML: Expected ']' at the end of a table declaration (at line 4, column 7)",
    ),
    (
        "top level key",
        (('name = "good"', 'nam = "good"'),),
        "unknown key 'nam' at the top level; known: name, description, cache, speculation, engine, offload, bounds, source, group",
    ),
    (
        "table key",
        (("tail_drop", "taildrop"),),
        "unknown key 'taildrop' in [cache]; known: hash_block_tokens, prefix_caching, tail_drop, hash_lookahead_tokens",
    ),
    (
        "group key",
        (("drafter", "draft"),),
        "unknown key 'draft' in [[group]] 'window'; known: name, kind, block_tokens, window_tokens, extra_tokens, drafter",
    ),
    ("no name", (('name = "good"\n', ""),), "missing key name at the top level"),
    ("no hash block", (("hash_block_tokens = 4\n", ""),), "missing key hash_block_tokens in [cache]"),
    (
        "no offload switch",
        (("enabled = true\n", ""),),
        "[offload] lacks the key enabled; write enabled = true or enabled = false",
    ),
    ("no group block", (("block_tokens = 8\n", ""),), "missing key block_tokens in [[group]] 'full'"),
    ("no group name", (('name = "full"\n', ""),), "missing key name in [[group]] 1"),
    (
        "bool for int",
        (("drafts = 3", "drafts = true"),),
        "drafts in [speculation] must be an integer, got True",
    ),
    (
        "int for bool",
        (("tail_drop = true", "tail_drop = 1"),),
        "tail_drop in [cache] must be true or false, got 1",
    ),
    ("float for int", (("pp = 2", "pp = 2.0"),), "pp in [engine] must be an integer, got 2.0"),
    ("int for text", (('name = "good"', "name = 3"),), "name at the top level must be a string, got 3"),
    (
        "kind",
        (('kind = "mamba"', 'kind = "mambo"'),),
        "kind in [[group]] 'state' must be one of full, window, chunked, mamba, got 'mambo'",
    ),
    ("kind type", (('kind = "mamba"', "kind = 1"),), "kind in [[group]] 'state' must be a string, got 1"),
    (
        "table type",
        (("[source]\n", "[x]\n"), ('name = "good"', 'name = "good"\nsource = 1')),
        "unknown key 'x' at the top level; known: name, description, cache, speculation, engine, offload, bounds, source, group",
    ),
    ("source text", (('"made up"', "1"),), "group.window in [source] must be a string, got 1"),
    (
        "smallest",
        (("hash_block_tokens = 4", "hash_block_tokens = 0"),),
        "hash_block_tokens in [cache] must be at least 1, got 0",
    ),
    (
        "negative",
        (("window_tokens = 6", "window_tokens = -6"),),
        "window_tokens in [[group]] 'window' must be at least 0, got -6",
    ),
    # one group
    (
        "name form",
        (('name = "good"', 'name = "Good one"'),),
        "name = 'Good one' must be lower case letters, digits, '.', '_' and '-'",
    ),
    ("two names", (('name = "state"', 'name = "full"'),), "two groups are named 'full'"),
    (
        "window without one",
        (("window_tokens = 6\n", ""),),
        "group 'window': kind = window needs window_tokens >= 1, got 0",
    ),
    (
        "window on full",
        (('kind = "full"', 'kind = "full"\nwindow_tokens = 6'),),
        "group 'full': kind = full has no window, got window_tokens = 6",
    ),
    (
        "extra on mamba",
        (('kind = "mamba"', 'kind = "mamba"\nextra_tokens = 2'),),
        "group 'state': extra_tokens = 2 is for kind = window, this group has kind = mamba",
    ),
    (
        "mamba blocks",
        (
            (
                'name = "state"',
                'name = "other"\nkind = "mamba"\nblock_tokens = 16\n\n[[group]]\nname = "state"',
            ),
        ),
        "Mamba groups need one block size: 'other' has block_tokens = 16, 'state' has 8",
    ),
    # cache
    (
        "hash block",
        (("hash_block_tokens = 4", "hash_block_tokens = 3"),),
        "hash_block_tokens = 3 does not divide block_tokens = 8 of group 'full'",
    ),
    (
        "lookahead uncached",
        (("tail_drop = true", "hash_lookahead_tokens = 1\nprefix_caching = false"),),
        "hash_lookahead_tokens = 1 needs prefix_caching = true",
    ),
    (
        "lookahead and drop",
        (("tail_drop = true", "tail_drop = true\nhash_lookahead_tokens = 1"),),
        "hash_lookahead_tokens = 1 replaces tail_drop = true: set one of them",
    ),
    (
        "lookahead and offload",
        (("tail_drop = true", "hash_lookahead_tokens = 1"),),
        "hash_lookahead_tokens = 1 with offload enabled = true: a connector switches it off",
    ),
    (
        "lookahead alone",
        (
            ("tail_drop = true", "hash_lookahead_tokens = 1"),
            ("enabled = true", "enabled = false"),
            ("draft_modules = 2", ""),
        ),
        "hash_lookahead_tokens = 1 is for a drafter that reads the cache, got drafts = 3 and draft_modules = 0",
    ),
    (
        "lookahead too long",
        (("tail_drop = true", "hash_lookahead_tokens = 4"), ("enabled = true", "enabled = false")),
        "hash_lookahead_tokens = 4 is more than the 3 that drafts = 3 with draft_modules = 2 read past a hit",
    ),
    (
        "drop alone",
        (("draft_modules = 2", ""),),
        "tail_drop = true is for a drafter that reads the cache, got drafts = 3 and draft_modules = 0",
    ),
    (
        "chunked and drop",
        (('kind = "window"', 'kind = "chunked"'), ("extra_tokens = 2", "")),
        "tail_drop = true with group 'window' of kind = chunked: its lookup knows no drop; flag the drafter's group with drafter = true",
    ),
    (
        "chunked beside larger blocks",
        (
            ('kind = "window"', 'kind = "chunked"'),
            ("extra_tokens = 2", ""),
            ("tail_drop = true", ""),
            ("hash_block_tokens = 4", "hash_block_tokens = 2"),
        ),
        "block_tokens = 4 of chunked group 'window' differs from 8, which hits align to: its lookup needs them equal",
    ),
    (
        "endless chunk",
        (("blocks_per_chunk = 2", "blocks_per_chunk = 1000000"),),
        "blocks_per_chunk = 1000000 times block_tokens = 8 of group 'full' is more than 1048576 tokens a chunk",
    ),
    (
        "endless alignment",
        (
            ("hash_block_tokens = 4", "hash_block_tokens = 1"),
            ("block_tokens = 4", "block_tokens = 131073"),
        ),
        "block_tokens = 8, 131073: their least common multiple, which hits align to, is 1048584, more than 1048576 tokens",
    ),
    (
        "blank group",
        (('name = "state"', 'name = " "'),),
        "name = ' ' of a group must not be blank",
    ),
    # speculation
    (
        "modules alone",
        (("drafts = 3", "drafts = 0"), ("tail_drop = true", "")),
        "draft_modules = 2 with drafts = 0: no module is ever run",
    ),
    (
        "drafts and state",
        (("drafts = 3", "drafts = 8"), ("extra_tokens = 2", "extra_tokens = 7")),
        "drafts + 1 = 9 exceeds block_tokens = 8 of Mamba group 'state': one step could cross two boundaries",
    ),
    (
        "extra and modules",
        (("draft_modules = 2", "draft_modules = 1"),),
        "group 'window': extra_tokens = 2, but drafts = 3 with draft_modules = 1 retains 0",
    ),
    (
        "extra too small",
        (("extra_tokens = 2", "extra_tokens = 1"),),
        "group 'window': extra_tokens = 1, but drafts = 3 with draft_modules = 2 retains 2",
    ),
    (
        "drafter without",
        (("tail_drop = true", ""), ("draft_modules = 2", ""), ("extra_tokens = 2", "")),
        "group 'window': drafter = true is for a drafter that reads the cache, got drafts = 3 and draft_modules = 0",
    ),
    (
        "drop below lookahead",
        (
            ("block_tokens = 8", "block_tokens = 4"),
            ('[[group]]\nname = "state"\nkind = "mamba"\nblock_tokens = 8\n', ""),
            ("drafts = 3", "drafts = 5"),
            ("extra_tokens = 2", "extra_tokens = 4"),
        ),
        "drafts = 5 read 5 tokens past a hit, more than the scheduler block of 4 tokens that the tail drop gives back",
    ),
    # engine
    ("runner", (("pp = 2", 'pp = 2\nrunner = "v3"'),), "runner = 'v3' must be 'v1' or 'v2'"),
    ("pp", (("pp = 2", "pp = 5"),), "pp = 5 is more than the 4 that the model walks"),
    ("tp", (("pp = 2", "pp = 2\ntp = 8"),), "tp = 8 is more than the 4 that the model walks"),
    (
        "v1 async pp",
        (("pp = 2", 'pp = 2\nrunner = "v1"'),),
        "runner = 'v1' with async_scheduling = true needs pp = 1, got pp = 2",
    ),
    # bounds
    (
        "budget",
        (("pool_blocks = 40", "step_tokens = 3"),),
        "step_tokens = 3 is less than drafts + 1 = 4: no step could verify all drafts",
    ),
    (
        "pool",
        (("pool_blocks = 40", "pool_blocks = 16"),),
        "pool_blocks = 16 (one is the null block) cannot hold one request of request_tokens = 24, which needs 16",
    ),
]


@pytest.mark.parametrize(("edits", "line"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
def test_refused_in_one_line(edits: tuple[tuple[str, str], ...], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(changed(*edits))
    assert str(caught.value) == line


def test_groups_must_be_a_list_of_tables() -> None:
    head = 'name = "x"\n[cache]\nhash_block_tokens = 4\n'
    with pytest.raises(ConfigError, match=r"^groups are written \[\[group\]\], with two brackets$"):
        config.parse(head + '[group]\nname = "full"\n')
    with pytest.raises(ConfigError, match=r"^\[\[group\]\] 1 must be a table, got 1$"):
        config.parse('name = "x"\ngroup = [1]\n')
    with pytest.raises(ConfigError, match=r"^no \[\[group\]\]: a deployment has at least one cache group$"):
        config.parse(head)


def test_every_rule_of_the_checker_has_a_refusal_above() -> None:
    """Each ``yield`` of the checker's rules is reached by one of the refusals (or by the empty group list)."""
    tree = ast.parse(inspect.getsource(config))
    rules = {
        node.lineno
        for function in tree.body
        if isinstance(function, ast.FunctionDef) and function.name.endswith("_problems")
        for node in ast.walk(function)
        if isinstance(node, ast.Yield)
    }
    reached: set[int] = set()

    def record(frame: FrameType, event: str, _: object) -> Callable[..., object]:
        if frame.f_code.co_filename == config.__file__:
            reached.add(frame.f_lineno)
        return record

    before = sys.gettrace()
    sys.settrace(record)
    try:
        for text in [changed(*edits) for _, edits, _ in REFUSALS] + [
            'name = "x"\n[cache]\nhash_block_tokens = 1\n'
        ]:
            with suppress(ConfigError):
                config.parse(text)
    finally:
        sys.settrace(before)
    assert len(rules) > 20 and not rules - reached


def test_a_file_is_named_in_its_refusal(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    assert str(caught.value) == f"{path}: cannot be read: No such file or directory"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    assert str(caught.value) == f"{path}: is not UTF-8 text"
    path.write_text(changed(("pp = 2", "pp = 5")))
    with pytest.raises(ConfigError) as caught:
        config.find(str(path))
    assert str(caught.value) == f"{path}: pp = 5 is more than the 4 that the model walks"


def test_an_unknown_name_is_told_near_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        config.find("gpt-os")
    assert str(caught.value) == "no configuration named 'gpt-os'; --list names all, such as gpt-oss"
    with pytest.raises(ConfigError, match="--list names all, such as "):
        config.find("")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = " + "[" * 5000, "not TOML that can be read: nested too deeply"),
        ("x = " + "9" * 5000, "not TOML: Exceeds the limit"),
        ('name = "a\\nb"', r"name at the top level must be one printable line, got 'a\nb'"),
        ('name = "x"\n[source]\n"a\\nb" = "c"', r"a\nb in [source] must be one printable line, got 'c'"),
        ("name = [" + "1," * 5000 + "]", "name at the top level must be a string, got [1, 1, 1"),
    ],
    ids=["deep", "digits", "newline", "newline in a key", "long value"],
)
def test_whatever_a_file_holds_the_refusal_is_one_short_line(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(text)
    assert str(caught.value).startswith(line)
    assert str(caught.value).isprintable() and len(str(caught.value)) <= config.LONGEST_MESSAGE + 5


@pytest.mark.parametrize("path", ["a\nb.toml", "a" * 5000 + ".toml", "a\0.toml"])
def test_whatever_a_path_is_the_refusal_is_one_short_line(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.find(path)
    assert str(caught.value).isprintable() and len(str(caught.value)) <= config.LONGEST_MESSAGE + 5


def test_every_integer_has_a_greatest_value() -> None:
    """A number that no deployment has would otherwise only be noticed by a report that never ends."""
    for owner in (Config, Group):
        for field in fields(owner):
            if field.type == "int":
                most = config.LARGEST_BOUNDS.get(field.name, config.LARGEST)
                for value in (most + 1, 10**30):
                    with pytest.raises(ConfigError, match=f"must be at most {most}, got {value}"):
                        config._typed(field, field.name, value, "here")


@pytest.mark.parametrize("key", config._TABLES["bounds"])
def test_a_world_that_would_exhaust_the_machine_is_refused(key: str) -> None:
    """The model's world is built whole; what a deployment is served with may be larger."""
    text = config.dump(replace(config.named("plain"), **{key: config.LARGEST_BOUNDS[key] + 1}))
    with pytest.raises(ConfigError, match=rf"{key} in \[bounds\] must be at most"):
        config.parse(text)


@pytest.mark.parametrize("name", config.shipped())
def test_shipped_configurations_are_named_after_their_file_and_described(name: str) -> None:
    loaded = config.named(name)
    assert loaded.name == name
    assert loaded.description and len(loaded.description) <= 120 and "\n" not in loaded.description


@pytest.mark.parametrize("name", config.shipped())
def test_text_and_data_agree(name: str) -> None:
    loaded = config.named(name)
    assert config.parse(config.dump(loaded)) == loaded


def test_dump_keeps_every_field() -> None:
    """Each field of the configuration, changed alone, is still there after a round trip."""
    good = config.parse(GOOD)
    others = {
        "name": "other", "description": 'quotes " and \\ and é', "source": (("a b", 'c"d'),), "runner": "v1",
        "groups": good.groups[:2], "hash_block_tokens": 2, "prefix_caching": False, "tail_drop": False, "drafts": 2,
        "hash_lookahead_tokens": 1, "draft_modules": 3, "pp": 1, "tp": 2, "async_scheduling": False,
        "offload": False, "blocks_per_chunk": 1, "offload_prompt_only": True, "pool_blocks": 99, "tier_chunks": 5,
        "slots": 1, "step_tokens": 7, "request_tokens": 20,
    }  # fmt: skip
    assert set(others) == set(Config.__dataclass_fields__)
    for field, value in others.items():
        assert getattr(good, field) != value
        changed_config = replace(good, **{field: value})  # type: ignore[arg-type]
        text = config.dump(changed_config)
        try:
            again = config.parse(text)
        except ConfigError:  # the change clashes with the rest: the text must still carry it
            assert field in ("tail_drop", "hash_lookahead_tokens", "drafts", "runner"), field
            assert text != config.dump(good)
            continue
        assert again == changed_config


@pytest.mark.parametrize(
    ("drafts", "modules", "lookahead", "retained"),
    [(0, 0, 0, 0), (3, 0, 0, 0), (3, 1, 1, 0), (1, 2, 1, 0), (3, 2, 3, 2), (4, 2, 4, 3)],
)
def test_what_a_drafter_reads_past_the_computed_range(
    drafts: int, modules: int, lookahead: int, retained: int
) -> None:
    one = Config("x", (Group("full", Kind.FULL, 16),), 16, drafts=drafts, draft_modules=modules)
    assert one.prefill_lookahead_tokens == lookahead
    assert one.reprefilled_tokens == retained


# -- the page ----------------------------------------------------------------------------------------------


def test_every_key_stands_in_the_documentation_with_its_default() -> None:
    rows = handbook.configuration_keys().splitlines()[2:]
    told = {tuple(cell.strip().strip("`") for cell in row.split("|")[1:5]) for row in rows}
    assert {(table, key) for table, key, *_ in told} == {
        *(("", key) for key in ("name", "description")),
        *((f"[{table}]", key) for table, names in config._TABLES.items() for key in names),
        *(("[[group]]", field.name) for field in fields(Group)),
    }
    assert ("[bounds]", "pool_blocks", "an integer", "24") in told
    assert all(row.split("|")[5].strip() for row in rows)


def test_the_example_of_the_documentation_can_be_served() -> None:
    page = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text(encoding="utf-8")
    one = config.parse(page.split("```toml\n")[1].split("```")[0])
    assert [group.kind for group in one.groups] == [Kind.FULL, Kind.WINDOW] and one.offload


@pytest.mark.parametrize("name", config.shipped())
def test_a_description_is_read_alone(name: str) -> None:
    """Listings are sorted by name and cut anywhere: nothing stands above."""
    words = config.named(name).description.lower()
    assert "as above" not in words and not words.startswith("the same"), words
