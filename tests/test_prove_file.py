"""Formulas of somebody's own, judged in place of the shipped ones: what is proved, refuted and refused."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("z3")

from spec.arith import coverage  # noqa: E402
from spec.arith.checked import DOMAINS  # noqa: E402
from spec.prove import __main__ as command  # noqa: E402
from spec.prove import engine, own  # noqa: E402
from spec.prove.theorem import Theorem  # noqa: E402
from spec.prove.theorems import theorems_of  # noqa: E402

ROOT = Path(__file__).parents[1]
THEOREMS = {theorem.number: theorem for theorem in theorems_of("arith")}

Judge = Callable[..., int]


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Judge the text of a file by these theorems (or their numbers); the exit code."""

    def run(text: str, theorems: tuple[int | Theorem, ...], *options: str) -> int:
        chosen = tuple(one if isinstance(one, Theorem) else THEOREMS[one] for one in theorems)
        monkeypatch.setattr(command, "theorems_of", lambda group: chosen)
        file = tmp_path / "mine.py"
        file.write_text(text, encoding="utf-8")
        return command.main(["--file", str(file), *options])

    return run


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """All that was printed, in one line."""
    return " ".join(capsys.readouterr().out.split())


# -- verdicts ------------------------------------------------------------------------------------------------

RIGHT = """
def _cdiv(a: int, b: int) -> int:
    return -(a // -b)

def lookup_window_chunks(hit, window, extra, chunk):
    assert chunk > 0, "no chunk"
    padding = _cdiv(hit, chunk) * chunk - hit
    return max(_cdiv(window, chunk), _cdiv(window - 1 + extra + padding, chunk))
"""


def test_another_way_to_write_a_formula_is_proved(judge: Judge, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(RIGHT, (1, 4, 9)) == 0
    out = said(capsys)
    assert "mine.py:5: lookup_window_chunks equals the shipped formula for all whole numbers" in out
    assert "remark 10 of 11 claims run none of your formulas and are left out." in out
    assert "theorems with your formulas: proved 1, 4; left out 9" in out
    assert "theorems 2/2 proved, claims 4/4 proved, lemmas 5/5 proved, z3" in out


WINDOW = "coverage.lookup_window_chunks_v0_30(hit, window, chunk)"
RELEASED = {  # a formula of 0.30.0 -> its body; the theorem, claim and refutation (by its place) of it
    "lookup_window_chunks(hit, window, extra, chunk)": (WINDOW, 1, "sliding window", 1),
    "in_flight_first_chunk(hit, local, window, extra, chunk)": (
        f"max(local // chunk, cdiv(hit, chunk) - {WINDOW})",
        4,
        "sliding window, in-flight check",
        0,
    ),
    "store_need_blocks(window, extra, block, drops)": (
        "coverage.store_need_blocks_v0_30(window, block, drops)",
        2,
        "hit m*F, group without drop",
        0,
    ),
    "base_window_chunks(window, extra, chunk)": (
        "coverage.base_window_chunks_v0_30(window, chunk)",
        3,
        "base against demand at h = m*t",
        0,
    ),
}


@pytest.mark.parametrize("call", RELEASED)
def test_a_released_formula_is_refuted_as_the_theorem_says(call: str, judge: Judge, tmp_path: Path) -> None:
    (body, number, name, place), found = RELEASED[call], tmp_path / "found.json"
    theorem = THEOREMS[number]
    alone = replace(theorem, claims=tuple(claim for claim in theorem.claims if claim.name == name))
    text = f"from spec.arith import cdiv, coverage\ndef {call}:\n    return {body}\n"
    assert judge(text, (alone,), "--json", str(found)) == 1
    (row,) = json.loads(found.read_text())["theorems"]
    (claim,) = row["claims"]
    recorded = theorem.refutes[place]
    assert "0.30.0" in recorded.formula and row["refutes"] == [] and claim["verdict"] == "refuted"
    smallest = engine.smallest_counterexample(recorded.claim, engine.SEARCH_BUDGET)
    assert claim["counterexample"] == smallest


def test_a_refutation_has_its_integers_and_where_the_formulas_part(
    judge: Judge, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, found = "def span_bound(tokens, block):\n    return -(-tokens // block)\n", tmp_path / "found.json"
    assert judge(text, (9, 19), "--json", str(found)) == 1
    out = said(capsys)
    assert "mine.py:1: span_bound differs first at tokens = 2, block = 2: 1, shipped 2" in out
    assert re.search(r"REFUTED: [^\]]*\]; false at s = 1, T = 2, b = 2", out)
    assert "theorems with your formulas: refuted 9; left out 19 A refuted claim is false of your" in out
    data = json.loads(found.read_text())
    assert data["exit_code"] == 1 and data["left_out"] == [19] and data["file"].endswith("mine.py")
    assert data["formulas"] == [
        {
            "name": "span_bound",
            "line": 1,
            "equals_shipped": False,
            "first_differs_at": {"tokens": 2, "block": 2},
            "own": 1,
            "shipped": 2,
            "reason": "",
        }
    ]
    assert coverage.span_bound(2, 2) == 2  # it is gone afterwards


def test_a_formula_that_is_copied_with_its_domain_is_the_files(judge: Judge) -> None:
    """As a user would begin: from the shipped text, whose decorator registers what it decorates."""
    before = dict(DOMAINS)
    text = "from spec.arith import cdiv\nfrom spec.arith.checked import POSITIVE, domain\n"
    text += inspect.getsource(coverage.span_bound)
    assert "@domain" in text and judge(text, (9,)) == 0
    edited = text.replace("cdiv(tokens - 1, block) + 1", "cdiv(tokens - 1, block)")
    assert edited != text and judge(edited, (9,)) == 1
    assert before == DOMAINS


def test_another_shared_formula_by_this_name_is_judged(judge: Judge) -> None:
    text = "from spec.arith.coverage import store_need_blocks_corrected as store_need_blocks\n"
    assert judge(text, (10,)) == 1
    assert judge(text.replace("_corrected as store_need_blocks", " as _alike\nfrom spec.arith import cdiv")
                 + "def store_need_blocks(window, extra, block, drops):\n"
                 "    return cdiv(window + extra - 1, block) + drops\n", (10,)) == 0  # fmt: skip


def test_what_is_not_decided_in_time_exits_3(judge: Judge, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(RIGHT, (4,), "--timeout", "0.000001") == 3
    assert "theorems with your formulas: undetermined 4" in capsys.readouterr().out


def test_a_list_has_the_theorems_that_would_be_judged(
    judge: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge(RIGHT, (1, 4, 9), "--list") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "4"]


def test_the_readme_formula_is_refuted(judge: Judge, capsys: pytest.CaptureFixture[str]) -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("<!-- section: your formula -->")[1]
    assert judge(section.split("```python\n")[1].split("```")[0], (1,)) == 1
    assert "false at h = 2, p = 0, W = 1, e = 2, b = 1, k = 1, j = 0" in said(capsys)


# -- refusals ------------------------------------------------------------------------------------------------

BOUND = "def span_bound(tokens, block):\n    "


SHIPPED = "from spec.arith import coverage\n"
NUMBER = "span_bound must return a whole number, got "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "def span_bounds():\n    return 1\n",
            ":1: no shared formula is named span_bounds; near: span_bound, ",
        ),
        ("def xyzzy():\n    return 1\n", "no shared formula is named xyzzy; near: none (spec/arith/"),
        ("x = 1\n", "mine.py: defines none of the shared formulas"),
        ("def span_bound(n):\n    return 1\n", ":1: span_bound must take (tokens, block), got (n); "),
        ("def cdiv(a, b):\n    pass\n", "must take (x, divisor), got (a, b); begin a helper's name with _"),
        ("span_bound = 3\n", "mine.py: span_bound must be a function, got 3"),
        ("import nothing_of_that_name\n", "mine.py:1: ModuleNotFoundError: "),
        ("\ndef span_bound(\n", "mine.py:2: SyntaxError: "),
        ("\n1 / 0\n", "mine.py:2: ZeroDivisionError: "),
        ("\nexit(0)\n", "mine.py:2: SystemExit: 0"),
        (BOUND + "return int(tokens / block)\n", "mine.py:2: TypeError: unsupported operand type(s) for /"),
        ("import math\n" + BOUND + "return math.ceil(tokens // block)\n", "mine.py:3: TypeError: "),
        (BOUND + "return 2.0\n", f"mine.py:1: {NUMBER}2.0; a formula may use whole numbers"),
        (BOUND + "return tokens > 3\n", f"mine.py:1: {NUMBER}a symbolic truth value"),
        (BOUND + "return sum(range(tokens))\n", "mine.py:2: TypeError: a symbolic integer has no value"),
        (BOUND + "while tokens > 0:\n        tokens -= block\n", "has more than 4096 paths: a loop that"),
        (BOUND + "exit(0)\n", "mine.py:2: SystemExit: 0"),
        (BOUND + "return tokns\n", "mine.py:2: span_bound raises NameError: name 'tokns' is not defined"),
        (SHIPPED + BOUND + "return coverage.span_bound(tokens, block)\n", ":3: span_bound calls itself"),
        ("from spec import arith\n" + BOUND + "return arith.cdiv(tokens, 2)\n", ":3: ArithError: cdiv: x"),
        ("def worth_loading(hit, local, chunk):\n    return hit\n", "must return True or False, got hit"),
        ("def stop_inside(start, end, stop):\n    return end\n", "no theorem of group arith runs stop_ins"),
    ],
)
def test_what_cannot_be_judged_is_one_line(
    text: str, message: str, judge: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge(text, (9,)) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("spec.prove: ") and message in err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "if tokens > 2 * block:\n        raise ValueError('big')\n    return 1 - (1 - tokens) // block\n",
            "mine.py:3: span_bound raises ValueError: big at tokens = 3, block = 1",
        ),
        (
            "return tokens // (block - 1)\n",
            "ZeroDivisionError: integer division or modulo by zero at tokens = 1, block = 1",
        ),
        (
            "return 0 if isinstance(tokens, int) else (tokens + block - 2) // block + 1\n",
            "proved on symbols, but false at s = 0, T = 1, b = 1: a formula may not use is, isinstance",
        ),
    ],
)
def test_what_plain_integers_bring_to_light(
    body: str, message: str, judge: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge(BOUND + body, (9,)) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("")
    for name, message in (
        (str(tmp_path), "is a folder"), (str(tmp_path / "no.py"), "no such file"), ("", "an empty name"),
        (str(tmp_path / "mine.txt"), "must end in .py"),
    ):  # fmt: skip
        assert command.main(["--file", name]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1


def test_the_documented_table_is_of_shipped_formulas(
    judge: Judge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge(RIGHT, (1,), "--markdown", str(tmp_path / "page.md")) == 2
    assert "--markdown writes the shipped theorems: leave out --file" in capsys.readouterr().err


def test_what_a_file_prints_does_not_spoil_a_report(judge: Judge, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(f"print('loaded'){RIGHT}", (4,), "--json", "-") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["formulas"][0]["equals_shipped"] and "loaded" in err


def test_a_truth_value_is_given_as_one(tmp_path: Path) -> None:
    """`drop` is a flag: both values are compared, and no other."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from spec.arith import round_down\n"
        "def checkpoint_position(tokens, unit, drop, lookahead):\n"
        "    if drop:\n"
        "        return max(tokens // unit - 1, 0) * unit\n"
        "    return max(round_down(tokens - max(1, lookahead), unit), 0)\n"
    )
    (mine,) = own.load(str(file))
    assert {own.both_answers(mine, {"tokens": 9, "unit": 4, "drop": d, "lookahead": 2}) for d in (0, 1)} == {
        (4, 4)
    }
    settings = engine.Settings(command.solver("z3"), 10.0)
    assert own.compared(mine, settings).equal
