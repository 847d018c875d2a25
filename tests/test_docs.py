"""Documentation: generated parts are fresh, what they name exists, and what the README shows is run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spec import core, handbook, walk
from spec.candidates import CANDIDATES, Candidate
from spec.events import CHOICE, SCHEMA
from spec.faults import CATALOGUE
from spec.faults.cases import CASES
from spec.prove.theorems import theorems_of
from spec.rules import BY_NAME, RULES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# A report that the catalogue shows beside those of the table.
FLAGSHIP = "vllm-54173"


@pytest.mark.parametrize("path", list(handbook.documents()), ids=lambda path: path.name)
def test_generated_parts_are_fresh(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert handbook.renewed(text) == text, "python -m spec.handbook"


def test_every_part_stands_in_a_document() -> None:
    used = {found[2] for path in DOCUMENTS for found in handbook.PART.finditer(path.read_text())}
    assert used == set(handbook.PARTS) | set(handbook.RECORDED)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository with one generated part."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("nothing generated\n")
    page = tmp_path / "docs" / "page.md"
    page.write_text("before\n<!-- part: core-actions -->\nold\n<!-- end part -->\nafter\n")
    monkeypatch.setattr(handbook, "ROOT", tmp_path)
    return page


def test_a_stale_part_is_noticed_and_written(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert handbook.main(["--check"]) == 1
    assert "docs/page.md: stale" in capsys.readouterr().out and "\nold\n" in tree.read_text()
    assert handbook.main([]) == 0
    assert tree.read_text().startswith("before\n") and "`allocate`" in tree.read_text()
    assert handbook.main(["--check"]) == 0


def test_outside_a_clone_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(handbook, "ROOT", tmp_path)
    assert handbook.main(["--check"]) == 2
    assert "run this in a clone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- part: nobody -->\n<!-- end part -->\n", "made by nobody"),
        ("<!-- part: core-actions -->\n", "no '<!-- end part -->'"),
    ],
)
def test_a_part_that_cannot_be_made_is_one_line(
    tree: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    tree.write_text(text)
    assert handbook.main([]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


# -- candidates ------------------------------------------------------------------------------------------

THEOREMS = {theorem.name for theorem in theorems_of("arith")}


def wrong_in(candidates: tuple[Candidate, ...]) -> Iterator[str]:
    """What the classification gets wrong."""
    wanted = [*(f"S{n}" for n in range(1, 51)), *(f"P{n}" for n in range(1, 13))]
    if [one.name for one in candidates] != wanted:
        yield "not the sixty-two"
    for one in candidates:
        yield from (f"{one.name}: no rule {name}" for name in one.rules if name not in BY_NAME)
        yield from (f"{one.name}: no theorem {name}" for name in one.theorems if name not in THEOREMS)
        if not (one.rules or one.theorems or one.world or one.rejected):
            yield f"{one.name}: unclassified"
        if not one.says.endswith("."):
            yield f"{one.name}: no sentence"


def test_every_candidate_is_classified_by_what_exists() -> None:
    assert list(wrong_in(CANDIDATES)) == []


def test_a_wrong_classification_would_be_noticed() -> None:
    bad = (Candidate("S1", "It holds.", rules=("gone",), theorems=("gone",)), Candidate("S2", "Nothing."))
    assert list(wrong_in(bad)) == [
        "not the sixty-two",
        "S1: no rule gone",
        "S1: no theorem gone",
        "S2: unclassified",
    ]


def test_every_rule_answers_some_candidate_or_is_named_here() -> None:
    """Rules that no candidate asked for, so that a new rule is compared with the candidates."""
    asked = {name for one in CANDIDATES for name in one.rules}
    assert set(BY_NAME) - asked == {
        "release_only_held",
        "publish_only_held",
        "job_ids_unique",
        "flush_only_pending",
        "steps_end_in_order",
        "drafter_reads_exact",
        "output_exact",
        "reset_forgets",
        "finished_is_cached",
        "hit_is_longest",
    }


# -- reports ---------------------------------------------------------------------------------------------


def test_every_report_is_shown_or_says_what_the_model_lacks() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) == len({case.url for case in CASES}) == 107
    shown = handbook.by_case()
    assert set(shown) - set(names) <= {FLAGSHIP}, "a fault names a report that is not in the list"
    for case in CASES:
        assert re.fullmatch(r"https://github\.com/[^/]+/[^/]+/(issues|pull)/\d+", case.url)
        if case.name in shown:
            assert not case.lacks, f"{case.name} is shown by {shown[case.name][0].name}: delete its reason"
        else:
            assert case.what.endswith(".") and case.lacks, f"{case.name}: neither shown nor explained"


def test_links_to_these_reports_are_the_same_everywhere() -> None:
    """An issue is not a pull request, though the web site forgives it."""
    link = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)")
    right = {link.fullmatch(case.url).groups(): case.url for case in CASES}  # type: ignore[union-attr]
    for path in [*DOCUMENTS, *sorted((ROOT / "spec").rglob("*.py"))]:
        for found in link.finditer(path.read_text(encoding="utf-8")):
            assert right.get(found.groups(), found[0]) == found[0], path.name


# -- pages -----------------------------------------------------------------------------------------------


def test_the_core_table_has_every_action() -> None:
    text = handbook.core_actions()
    for kind, action in core.CORE_ACTION.items():
        assert re.search(rf"^\| `{kind}` \|.*\| `{action}` \|", text, re.MULTILINE)
    assert text.count("\n| `") == len(core.CORE_ACTION)


def test_the_block_passes_every_station() -> None:
    told = handbook.one_block()
    for words in (
        "gets it fresh",
        "zeroes it",
        "writes its cells",
        "goes under the key",
        "holds it too: a hit",
        "gives it up",
        "fenced from now on",
        "its key is forgotten",
        "must wait for store",
        "rank 1: store 3 reads it",
        "rank 1 reports store 3",
        "is loadable",
    ):
        assert words in told, words


def test_the_walk_page_names_everything_and_reached_every_witness() -> None:
    text = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
    part = next(found[3] for found in handbook.PART.finditer(text) if found[2] == "walk")
    counts = {
        m[1]: int(m[2].replace(",", "")) for m in re.finditer(r"^\| `(\w+)` \|.*?\| ([\d,]+)", part, re.M)
    }
    choices = {kind for kind, (category, *_) in SCHEMA.items() if category == CHOICE}
    assert counts.keys() >= choices | {rule.name for rule in RULES} | set(walk.WITNESSES)
    assert all(counts[name] for name in (*walk.WITNESSES, *(rule.name for rule in RULES)))
    assert "Verdict: holds" in part and part.startswith("`python -m spec.walk --markdown docs/walk.md`")


def test_a_short_walk_writes_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- part: walk -->\nold\n<!-- end part -->\n")
    assert walk.main(["--runs", "1", "--choices", "40", "--markdown", str(page)]) == 0
    assert "| `schedule` |" in page.read_text() and "\nold\n" not in page.read_text()
    page.write_text("nothing\n")
    assert walk.main(["--runs", "1", "--choices", "5", "--markdown", str(page)]) == 2


def dirty_records(text: str) -> list[str]:
    """Commits that a record names although files differed from them."""
    return re.findall(r"\bcommit `?([0-9a-f]{7,}\+)", text)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_is_recorded_was_made_by_a_commit(path: Path) -> None:
    assert dirty_records(path.read_text(encoding="utf-8")) == [], "record it anew on a clean tree"


def test_a_dirty_record_would_be_noticed() -> None:
    part = "On this machine, commit {}: 1 run.\n"
    assert dirty_records(part.format("1ed129c7e8c6+")) == ["1ed129c7e8c6+"]
    assert dirty_records(part.format("1ed129c7e8c6")) == []


def anchors(path: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_within_the_documentation_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]*(?:#[^)\s]+)?)\)", path.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{path.name}: {target}"
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), f"{path.name}: {target}"


def test_commands_in_the_documentation_exist() -> None:
    for path in DOCUMENTS:
        for name in re.findall(r"python -m ((?:spec|impl|props)[\w.]*\w)", path.read_text(encoding="utf-8")):
            file = ROOT / name.replace(".", "/")
            file = file / "__main__.py" if file.is_dir() else file.with_suffix(".py")
            assert file.is_file(), f"{path.name}: python -m {name}"
            assert file.name == "__main__.py" or '__name__ == "__main__"' in file.read_text(), name


# -- the README's own fault ------------------------------------------------------------------------------


def snippet() -> str:
    """The fault that the README shows."""
    section = README.split("<!-- section: write a fault -->")[1].split("<!-- end section")[0]
    return section.split("```python\n")[1].split("```")[0]


def hunt(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the README's command on a file."""
    command = [sys.executable, "-m", "spec.faults", "hunt", "--file", str(path), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_readme_fault_is_refuted_and_its_repair_is_not(tmp_path: Path) -> None:
    file = tmp_path / "my_fault.py"
    file.write_text(snippet())
    done = hunt(file)
    assert done.returncode == 1, done.stderr
    assert "refuted: my-fault in window-async" in done.stdout and "breaks window_reads_exact" in done.stdout
    assert len(snippet().splitlines()) <= 17
    repaired = snippet().replace("request.computed}", "request.processed}")
    assert repaired != snippet()
    file.write_text(repaired)
    held = hunt(file, "--runs", "20", "--choices", "100")
    assert held.returncode == 3 and "not refuted" in held.stdout
    assert "every answer was the reference's: free_basis" in held.stdout


def test_the_readme_command_is_about_a_fault_of_the_catalogue() -> None:
    for name in re.findall(r"python -m spec\.faults (?:hunt|show) ([a-z][\w-]*)", README):
        assert name in CATALOGUE


def test_the_proof_that_the_readme_shows_is_what_the_prover_prints() -> None:
    from spec.prove import report
    from spec.prove.engine import Settings, prove_theorem
    from spec.prove.solvers import solver

    block = README.split("<!-- section: proof -->")[1].split("```")[1].strip("\n")
    theorem = next(one for one in theorems_of("coverage") if one.name == "chunk coverage")
    printed = " ".join(report.theorem_text(prove_theorem(theorem, Settings(solver("z3")))).split())
    for line in block.splitlines():
        assert " ".join(line.split()) in printed, line
