"""A fault file of somebody's own: what is wrong with the file is no verdict; what was not tried is told;
where nothing is found, variants of its configurations are tried."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spec import config as configs
from spec.config import Config, pool_blocks_of_one_request, problems
from spec.events import NotADecision, check_decision
from spec.faults import CATALOGUE, own
from spec.faults.__main__ import main
from spec.faults.fault import DECISION, LIVENESS
from spec.faults.guard import guarded, policy_of
from spec.faults.hunt import stored
from spec.faults.idle import does_nothing_else
from spec.faults.variants import variants
from spec.reduce import replay

HEAD = """from spec import ops
from spec.faults import Fault
from spec.faults.tamper import *
from spec.policy import Answer, PolicyError
from spec.reference import Reference
from spec.reference.worker import Worker


"""

TAIL = """
FAULT = Fault("mine", "ownership", "decision", "it", "that", ("me",), bites=BITES, tamper=TAMPER)
"""


def operation(code: str) -> str:
    """An own operation in the place of post-processing."""
    return f"""class Mine(ops.PostProcess):
    def {code}
def edit(rank, program):
    return [(s, Mine(o.step, o.rows) if type(o) is ops.PostProcess else o) for s, o in program]
"""


def policy(code: str) -> str:
    """A subclass of the reference."""
    return f"class Mine(Reference):\n    def {code}\n"


def hunt_file(
    folder: Path, code: str, tamper: str, bites: str = "('plain',)", *options: str, runs: int = 12
) -> int:
    """Hunt a file with this code before its fault."""
    file = folder / "mine.py"
    tail = TAIL.replace("BITES", bites).replace("TAMPER", tamper)
    file.write_text(HEAD + code + tail, encoding="utf-8")
    return main(["hunt", "--file", str(file), "--runs", str(runs), "--choices", "60", *options])


# -- errors of the file -----------------------------------------------------------------------------------

SUBCLASS = "lambda policy: Mine"
EDIT = "enqueuing(edit)"


@pytest.mark.parametrize(
    ("code", "tamper", "said"),
    [
        (operation("run(self, world, rank): raise ValueError('mine')"), EDIT, ":10: ValueError: mine"),
        (operation("run(self, world, rank): {}['no']"), EDIT, ":10: KeyError: 'no'"),
        (operation("blocked(self, world, rank): {}['no']"), EDIT, ":10: KeyError: 'no'"),
        (operation("run(self, world, rank): world.clients['nobody']"), EDIT, ":10: KeyError: 'nobody'"),
        (policy("on_output(self, output): return None"), SUBCLASS, ":10: on_output: must answer a "),
        (policy("on_output(self, output): exit(0)"), SUBCLASS, ":10: SystemExit: 0"),
        (policy("__init__(self, config, chains): self.x = 1 / 0"), SUBCLASS, ":10: ZeroDivisionError"),
        (policy("__init__(self): pass"), SUBCLASS, "TypeError"),
        ("class Mine:\n    def __init__(self, config, chains): pass\n", SUBCLASS, ":10: must make a policy "),
        ("", "lambda policy: None", ":10: tamper must return a policy factory"),
        ("", "lambda policy: policy.nothing", ":10: AttributeError"),
        ("", "lambda policy: lambda config, chains: None", ":10: must make a policy "),
        ("", "enqueuing(lambda r, p: [o for s, o in p])", ":10: worker_program: a program's entries"),
        ("", "enqueuing(lambda r, p: [('no', o) for s, o in p])", ":10: worker_program: there is no stream"),
        ("", "enqueuing(lambda r, p: 7)", ":10: worker_program: a program must be a list"),
        ("", "enqueuing(lambda r, p: 1 / 0)", ":10: ZeroDivisionError"),
        ("", "editing('alloc', lambda b, e: [(e[0],)])", "must have the fields u, g, col, b"),
        ("", "editing('alloc', lambda b, e: [('no', 1)])", ":10: schedule: there is no decision 'no'"),
        ("", "editing('alloc', lambda b, e: [('exec', 0, 'main', 'x')])", "there is no decision 'exec'"),
        ("", "editing('alloc', lambda b, e: [(*e[:4], '1')])", "field 'b' of decision"),
        ("", "answering(lambda book, events: None)", "must be a list of decisions, got None"),
        (policy("on_reset(self, scope): return Answer([('drop', ('no', 9), 0, 0, 5)])"),
         SUBCLASS, ": what its policy answers or enqueues cannot happen: KeyError: ('no', 9)"),
    ],
)  # fmt: skip
def test_an_error_of_the_file_is_one_line_and_exit_2(
    code: str, tamper: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hunt_file(tmp_path, code, tamper, "('hybrid-pp1',)") == 2
    told = capsys.readouterr()
    assert f"mine.py{said}" in told.err or (said[0] != ":" and said in told.err)
    assert told.err.count("\n") == 1 and "verdict" not in told.out


def test_an_engines_assertion_is_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raises = "(self, world, rank): raise PolicyError('an assertion')"
    for code, tamper in (
        (operation(f"run{raises}"), EDIT),
        (policy("schedule(self): raise PolicyError('an assertion')"), SUBCLASS),
    ):
        assert hunt_file(tmp_path, code, tamper, "('hybrid-pp1',)") == 1
        out = capsys.readouterr().out
        assert "breaks policy_raises_no_error" in out and "an assertion" in out


def test_no_fault_of_the_catalogue_answers_what_is_no_decision() -> None:
    """The check of answers and programs refuses none of the faults that the tool itself ships."""
    looked_at = 0
    for fault in CATALOGUE.values():
        if fault.kind not in (DECISION, LIVENESS) or not (run := stored(fault.name)):
            continue
        config, rule, choices = run
        world = replay(config, guarded(fault.policy, "no-such-file.py"), choices)
        assert world.verdict is not None and world.verdict.rule == rule
        looked_at += 1
    assert looked_at > 60


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (["drop"], "must be a tuple"),
        ((), "must be a tuple"),
        ((["drop"],), "there is no decision"),
        (("arrive", "r1", "0", 1, 1), "there is no decision 'arrive'"),
        (("drop", ("r1", 1), 0, 0), "must have the fields u, g, col, b"),
        (("drop", "r1", 0, 0, 3), "field 'u'"),
        (("drop", ("r1", 1), 0, True, 3), "field 'col'"),
        (("tokens", ("r1", 1), 1, [5], 3), "must be a tuple of integers"),
        (("job", 1, "sideways", ("r1", 1), ()), "'store' or 'load'"),
    ],
)
def test_what_is_no_decision_is_told(event: Any, said: str) -> None:
    with pytest.raises(NotADecision, match=said):
        check_decision(event)
    check_decision(("drop", ("r1", 1), 0, 0, 3))


# -- what was not tried -----------------------------------------------------------------------------------

SAME = operation("run(self, world, rank): super(Mine, self).run(world, rank)")
OTHER = operation(
    "run(self, world, rank):\n        super(Mine, self).run(world, rank); rank.memory.accepted[-1] = 9"
)
BACKWARDS = (
    "enqueuing(lambda rank, program: [(s, ops.Zero(o.blocks[::-1]) if type(o) is ops.Zero else o) "
    "for s, o in program])"
)


@pytest.mark.parametrize(
    ("code", "tamper", "wanted"),
    [
        ("", "enqueuing(lambda rank, program: program)", 3),
        ("", "editing('drop', lambda book, event: [event])", 3),
        (policy("on_reset(self, scope): return super().on_reset(scope)"), SUBCLASS, 3),
        (SAME, EDIT, 3),
        ("", BACKWARDS, 0),
    ],
)  # fmt: skip
def test_a_tamper_that_changes_nothing_is_undetermined(
    code: str, tamper: str, wanted: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hunt_file(tmp_path, code, tamper, "('hybrid-pp1',)") == wanted
    out = capsys.readouterr().out
    assert ("the tamper changed nothing" in out) == (wanted == 3)


def test_a_tamper_is_compared_by_what_it_decides_enqueues_and_writes(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for code, nothing in ((SAME, True), (OTHER, False)):
        tail = TAIL.replace("BITES", "('hybrid-pp1',)").replace("TAMPER", EDIT)
        file.write_text(HEAD + code + tail, encoding="utf-8")
        fault = own.load(str(file))
        todo = [configs.named("hybrid-pp1")]
        policies = policy_of(fault, str(file)), fault.repaired
        assert does_nothing_else(todo, *policies, runs=3, choices=40, seed=0) == nothing


# -- whose doing it is ------------------------------------------------------------------------------------


def test_what_breaks_without_the_fault_too_is_not_its_doing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, record = tmp_path / "mine.py", tmp_path / "found.json"
    broken_base = "base={'fence_done': lambda waiting: True}, "
    harmless = "enqueuing(lambda rank, program: list(program) + [])"
    for base, code in ((broken_base, 3), ("", 3)):
        tail = TAIL.replace("bites", base + "bites").replace("BITES", "('fences', 'plain')")
        file.write_text(HEAD + tail.replace("TAMPER", harmless), encoding="utf-8")
        arguments = ["hunt", "--file", str(file), "--runs", "30", "--choices", "100", "--json", str(record)]
        assert main(arguments) == code
        out, found = capsys.readouterr().out, json.loads(record.read_text())
        assert ("fences" in found["broken_without"]) == bool(base)
        assert ("in fences, and so does the design without the fault" in out) == bool(base)
        assert "not refuted in plain (30 runs" in out and found["hunt"]["choices"] == []
        assert ("without the fault it breaks too: fences;" in out) == bool(base)


# -- variants ---------------------------------------------------------------------------------------------


def served() -> list[Config]:
    """The configurations that the tool walks."""
    return [configs.load(path) for path in configs.shipped().values() if path.parent.name == "configs"]


def test_variants_can_be_served_and_are_small() -> None:
    seen = set()
    for config in served():
        names = [title for title, _ in variants(config)]
        assert len(names) == len(set(names)) and len(names) <= 8
        for title, one in variants(config):
            assert not list(problems(one)) and configs.parse(configs.dump(one)) == one
            assert one != config and title.startswith(f"{config.name} with ")
            assert (
                one.pool_blocks <= config.pool_blocks
                or one.pool_blocks <= 2 * (pool_blocks_of_one_request(one)) + 1
            )
            assert (one.pp, one.runner, one.prefix_caching) == (
                config.pp,
                config.runner,
                config.prefix_caching,
            )
            seen |= {name for name in ("tp", "tier_chunks", "request_tokens", "drafts", "async_scheduling")
                     if getattr(one, name) != getattr(config, name)}  # fmt: skip
    assert seen == {"tp", "tier_chunks", "request_tokens", "drafts", "async_scheduling"}


KEPT_KEYS = "None, change={'forgets_key': lambda block: False}"


def test_a_fault_that_needs_a_small_pool_is_found_in_a_variant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block's key outlives its bytes: nothing is handed out twice where there is room for everything."""
    record, roomy = tmp_path / "found.json", replace(configs.named("plain"), name="roomy", pool_blocks=2000)
    (tmp_path / "roomy.toml").write_text(configs.dump(roomy), encoding="utf-8")

    def hunted(name: str) -> tuple[int, str]:
        bites = f"({str(tmp_path / name)!r},)"
        code = hunt_file(tmp_path, "", KEPT_KEYS, bites, "--json", str(record), runs=100)
        return code, capsys.readouterr().out

    code, out = hunted("roomy.toml")
    found = json.loads(record.read_text())
    config = configs.parse(found["configuration"])
    assert code == 1 and "roomy.toml (100 runs of 60 choices" in out
    assert (
        "refuted: mine in roomy with " in out and f"pool_blocks = {config.pool_blocks}, found in run" in out
    )
    assert config.pool_blocks <= 2 * pool_blocks_of_one_request(roomy) + 1
    assert found["configuration"] in out and "without the fault: holds in the same run" in out
    choices = [tuple(choice) for choice in found["hunt"]["choices"]]
    fault = own.load(str(tmp_path / "mine.py"))
    world = replay(config, fault.policy, choices)
    assert world.verdict is not None and world.verdict.rule == found["hunt"]["rule"]
    assert replay(config, fault.repaired, choices).verdict is None
    (tmp_path / "variant.toml").write_text(found["configuration"], encoding="utf-8")
    code, out = hunted("variant.toml")
    assert code == 1 and f"found in run {found['hunt']['runs']} " in out


def test_variants_get_at_most_as_many_runs_as_the_file_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spec.faults import ownhunt

    asked: list[tuple[str, int]] = []

    def nothing(config: Config, policy: Any, *, runs: int, **options: Any) -> None:
        asked.append((config.name, runs))

    monkeypatch.setattr(ownhunt, "find", nothing)
    same = "enqueuing(lambda rank, program: program)"
    for runs in (3, 40):
        asked.clear()
        assert hunt_file(tmp_path, "", same, "('composed', 'fences')", runs=runs) == 3
        assert asked[:2] == [("composed", runs), ("fences", runs)]
        shipped = configs.shipped()
        variants = [count for name, count in asked[2:] if name not in shipped]
        others = {name: count for name, count in asked[2:] if name in shipped}
        assert 0 < sum(variants) <= 2 * runs
        assert others == dict.fromkeys(
            set(shipped) - {"composed", "fences"}, max(1, 2 * runs // (len(shipped) - 2))
        )


def test_the_documentation_shows_how_a_worker_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "model.md").read_text(encoding="utf-8")
    shown = page.split("set as `self.workers`:")[1].split("```")[1].removeprefix("python\n")
    code = "class MyWorker(Worker):\n    def program(self, message):\n        raise PolicyError('asked')\n"
    assert hunt_file(tmp_path, code + shown, SUBCLASS) == 1
    assert "asked" in capsys.readouterr().out
