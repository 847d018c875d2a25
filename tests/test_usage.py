"""Every command ends in the same ways: bad usage, a target that cannot be written, Ctrl-C; reports alike."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spec import config as configs
from spec import outputs, trace, usage
from spec.outputs import OutputError

ROOT = Path(__file__).parents[1]

#: command -> (its module, arguments that start something short)
COMMANDS: dict[str, tuple[str, list[str]]] = {
    "spec.walk": ("spec.walk", ["--config", "plain", "--runs", "1", "--choices", "20"]),
    "spec.lockstep": ("spec.lockstep", ["--config", "plain", "--runs", "1", "--choices", "20"]),
    "spec.prove": ("spec.prove.__main__", ["coverage"]),
    "spec.prove.mutants": ("spec.prove.mutants", ["cdiv"]),
    "spec.geometry": ("spec.geometry", ["plain"]),
    "spec.scenario": ("spec.scenario", ["mid-block"]),
    "spec.trace": ("spec.trace", ["check", "RUN"]),
    "spec.handbook": ("spec.handbook", ["--check"]),
    "spec.faults": ("spec.faults.__main__", ["hunt", "no-fence", "--runs", "20"]),
    "impl.refine": ("impl.refine", ["--config", "plain", "--runs", "1", "--choices", "20"]),
    "impl.inject": ("impl.inject", ["--fault", "no-fence", "--runs", "1"]),
    "impl.soak": ("impl.soak.__main__", ["--requests", "3"]),
    "impl.bench": ("impl.bench.__main__", []),
}
REAL = ("impl.refine", "impl.inject", "impl.soak")
SEEDED = ("spec.walk", "spec.lockstep", "spec.prove", "spec.faults", *REAL)
WITH_JSON = (*SEEDED, "spec.prove.mutants", "spec.geometry", "spec.trace")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run."""
    path = tmp_path_factory.mktemp("usage") / "run.trace"
    trace.write_run(path, configs.named("plain"), "reference", [("arrive", "r1", "0", 3, 2), ("quiet",)])
    return path


def module_of(name: str) -> Any:
    if name.startswith("impl."):
        pytest.importorskip("torch")
    if name.startswith("spec.prove"):
        pytest.importorskip("z3")
    return importlib.import_module(COMMANDS[name][0])


def words_of(name: str, run: Path) -> list[str]:
    return [str(run) if word == "RUN" else word for word in COMMANDS[name][1]]


def code_of(name: str, words: list[str]) -> int:
    """The exit code, whoever gives it."""
    main: Callable[[list[str]], int] = module_of(name).main
    try:
        return main(words)
    except SystemExit as stopped:
        assert isinstance(stopped.code, int)
        return stopped.code


# -- bad usage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_bad_usage_is_one_line(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(name, [*words_of(name, run), "--nonsense"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "unrecognized arguments: --nonsense" in err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--help"], 0, "usage: python -m NAME "),
        (["--nonsense"], 2, "unrecognized arguments: --nonsense (--help shows the usage)\n"),
        ([], 2, "NAME: torch is not installed: pip install -e '.[kernels]'\n"),
    ],
)
@pytest.mark.parametrize("name", REAL)
def test_options_do_without_torch(name: str, words: list[str], code: int, said: str) -> None:
    hidden = f"import runpy, sys; sys.modules['torch'] = None; sys.argv[1:] = {words!r}; "
    run = f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    done = subprocess.run(
        [sys.executable, "-c", hidden + run], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == code and said.replace("NAME", name) in done.stdout + done.stderr
    assert done.stderr.count("\n") == (code == 2)


@pytest.mark.parametrize("value", ["-1", "x", "99999999999"])
@pytest.mark.parametrize("name", SEEDED)
def test_seeds_are_the_same_everywhere(
    name: str, value: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(name, [*words_of(name, run), "--seed", value]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert f"must be a whole number from 0 to 2147483647, got {value}" in err


@pytest.mark.parametrize("name", ["spec.walk", "spec.lockstep"])
def test_policies_that_can_be_named_are_in_the_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(name, ["--help"]) == 0
    assert "reference, fault:NAME, repaired:NAME" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("spec.faults", ["hunt", "nobody"]),
        ("spec.faults", ["show", "nobody"]),
        ("impl.inject", ["--fault", "nobody"]),
        ("impl.soak", ["--fault", "nobody"]),
    ],
)
def test_an_unknown_fault_is_told_in_the_same_words(
    name: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(name, words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"{name}: no fault named 'nobody'; ") and err.endswith(" shows all\n")


WITHOUT_LIST = ("spec.trace", "spec.faults", "spec.prove.mutants")


@pytest.mark.parametrize("name", [name for name in WITH_JSON if name not in WITHOUT_LIST])
def test_a_list_is_no_report(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target in ("-", str(tmp_path / "list.json")):
        assert code_of(name, ["--list", "--json", target]) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1 and "--list writes no report: leave out --json" in err


@pytest.mark.parametrize("name", ["spec.walk", "impl.refine"])
def test_two_reports_go_into_two_files(
    name: str, tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, link = tmp_path / "both", tmp_path / "link"
    link.symlink_to(file)
    assert code_of(name, [*words_of(name, run), "--record", str(file), "--json", str(link)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and f"--json and --record name the same file, {file}: name" in err
    assert not file.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replay", "RUN", "--config", "plain"], "leave out --config"),
        (["--replay", "RUN", "--runs", "2"], "leave out --runs"),
        (["--all", "--config", "plain"], "leave out --config"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    words: list[str], said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("impl.refine", [str(run) if word == "RUN" else word for word in words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and said in err


# -- targets -------------------------------------------------------------------------------------------------

TARGETS = [
    *((name, "--json") for name in (*WITH_JSON, "impl.bench")),
    *((name, "--record") for name in ("spec.walk", "impl.refine")),
    *((name, "--markdown") for name in ("spec.walk", "spec.prove", *REAL)),
    ("spec.scenario", "--record"),
    ("spec.trace", "--output"),
]
BAD_TARGETS = {
    "a folder": "FOLDER",
    "no name": "",
    "no such folder": "FOLDER/no/such",
    "a file as a folder": "FOLDER/file/x",
    "a long name": "FOLDER/" + "x" * 300,
    "nobody writes there": "/proc/x",
}


@pytest.mark.parametrize("what", BAD_TARGETS)
@pytest.mark.parametrize(("name", "option"), TARGETS)
def test_a_bad_target_is_refused_before_anything_runs(
    name: str, option: str, what: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if (name, what) == ("spec.scenario", "a folder"):
        pytest.skip("this one wants a folder")
    (tmp_path / "file").write_text("kept")
    target = BAD_TARGETS[what].replace("FOLDER", str(tmp_path))
    words = ["shrink", str(run)] if option == "--output" else words_of(name, run)
    assert code_of(name, [*words, option, target]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith(f"{name}: {option} ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (
        tmp_path / "file"
    ).read_text() == "kept"


@pytest.mark.parametrize("name", ["spec.walk", *REAL])
@pytest.mark.parametrize(
    "text", ["nothing\n", "<!-- part: else -->\n<!-- end part -->\n", "<!-- part: PART -->\n"]
)
def test_a_document_without_the_part_is_refused_before_anything_runs(
    name: str, text: str, tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text.replace("PART", name.split(".")[1]))
    assert code_of(name, [*words_of(name, run), "--markdown", str(page)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and f"has no '<!-- part: {name.split('.')[1]} -->'" in err


def test_only_json_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--record", "--markdown"):
        assert code_of("spec.walk", [option, "-"]) == 2
        assert f"{option} -: only --json goes to standard output" in capsys.readouterr().err


def test_a_scenario_that_cannot_be_rewritten_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("spec.scenario", ["--rewrite", "/proc/version"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1


def test_files_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept"
    kept.write_text("old")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            outputs.write_whole(kept, "new")
    assert kept.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["kept"]
    outputs.write_whole(kept, "new")
    assert kept.read_text() == "new" and [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    outputs.check_target("--json", link)
    outputs.write_whole(link, "text")
    assert link.is_symlink() and file.read_text() == "text"
    outputs.check_target("--json", "/dev/null")
    outputs.write_whole("/dev/null", "text")
    assert Path("/dev/null").is_char_device()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OutputError):
        outputs.check_target("--json", loop)


def test_a_folder_that_goes_away_meanwhile_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="gone/x: cannot be written .No such file or directory."):
        outputs.write_whole(tmp_path / "gone" / "x", "text")


# -- standard output -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_JSON)
def test_json_to_standard_output_is_all_that_stands_there(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_of(name, [*words_of(name, run), "--json", "-"]) in (0, 1, 3)
    out, err = capsys.readouterr()
    assert isinstance(json.loads(out), dict) and err
    assert not list(tmp_path.iterdir()) and sys.stdout is not sys.stderr


# -- Ctrl-C --------------------------------------------------------------------------------------------------

#: command -> what is being done when Ctrl-C comes
MEANWHILE = {
    "spec.walk": "walk_once",
    "spec.lockstep": "walk_once",
    "spec.prove": "prove_all",
    "spec.prove.mutants": "fate_of",
    "spec.geometry": "report",
    "spec.scenario": "verify",
    "spec.trace": "check",
    "spec.handbook": "renewed",
    "spec.faults": "hunt_one",
    "impl.refine": "refine_once",
    "impl.inject": "rows",
    "impl.bench": "_no_device",
}


def interrupt(*_: object, **__: object) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", MEANWHILE)
def test_ctrl_c_is_told_and_undetermined(
    name: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module_of(name), MEANWHILE[name], interrupt)
    assert code_of(name, words_of(name, run)) == 3
    out, err = capsys.readouterr()
    assert "stopped" in out + err and err.count("\n") <= 1 and "Traceback" not in out + err


@pytest.mark.parametrize("name", ["spec.walk", "spec.prove", "impl.refine", "impl.inject"])
def test_ctrl_c_leaves_documents_as_they_are(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    text = f"<!-- part: {name.split('.')[1]} -->\nold\n<!-- end part -->\n"
    page.write_text(text)
    monkeypatch.setattr(module_of(name), MEANWHILE[name], interrupt)
    assert code_of(name, [*words_of(name, run), "--markdown", str(page)]) == 3
    assert page.read_text() == text


@pytest.mark.parametrize("words", [["check"], ["hunt", "--file", "FILE"]])
def test_ctrl_c_in_the_other_hunts(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module_of("spec.faults"), "check_stored", interrupt)
    monkeypatch.setattr("spec.faults.ownhunt.find", interrupt)
    file = tmp_path / "mine.py"
    file.write_text(
        "from spec.faults import Fault\n"
        'FAULT = Fault(name="mine", kind="decision", mechanism="fence", did="d", repair="r", source=("s",),\n'
        '              change={"fence_done": lambda waits_for: True}, bites=("fences",))\n'
    )
    assert code_of("spec.faults", [str(file) if word == "FILE" else word for word in words]) == 3
    out, err = capsys.readouterr()
    assert "stopped" in out + err and err.count("\n") <= 1


def test_what_was_found_until_ctrl_c_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inject, lockstep = module_of("impl.inject"), module_of("spec.lockstep")
    made = inject.rows

    def rows(args: Any, chosen: Any) -> Any:
        yield next(made(args, chosen))
        raise KeyboardInterrupt

    monkeypatch.setattr(inject, "rows", rows)
    file = tmp_path / "found.json"
    assert inject.main(["--fault", "no-fence", "--fault", "fence-dropped-early", "--json", str(file)]) == 3
    found = json.loads(file.read_text())
    assert found["stopped"] and [row["fault"] for row in found["faults"]] == ["no-fence"]
    assert "stopped after 1 of 2 faults" in capsys.readouterr().out

    walked = lockstep.walk_once

    def walk_once(config: Any, policy: Any, seed: int, number: int, choices: int) -> Any:
        return walked(config, policy, seed, number, choices) if number < 2 else interrupt()

    monkeypatch.setattr(lockstep, "walk_once", walk_once)
    assert lockstep.main(["--config", "plain", "--choices", "20", "--json", str(file)]) == 3
    found = json.loads(file.read_text())
    assert found["stopped"] and found["verdict"] == "undetermined" and found["answers"]
    assert "stopped after 2 of 20 runs" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [["spec.prove", "arith"], ["spec.lockstep", "--runs", "100000"], ["spec.walk", "--runs", "100000"]],
    ids=lambda words: words[0],
)
def test_a_real_ctrl_c(words: list[str], tmp_path: Path) -> None:
    """z3 takes the signal while it decides, and Python ignores what is raised in a ``__del__``."""
    module_of(words[0])
    file = tmp_path / "found.json"
    running = subprocess.Popen(
        [sys.executable, "-u", "-m", *words, "--json", str(file)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert running.stdout is not None and running.stdout.readline()  # it has begun
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 3 and not err, err
    assert "stopped" in out and json.loads(file.read_text())["stopped"]


# -- the wrapper itself --------------------------------------------------------------------------------------


def ended(doing: Callable[[], int]) -> int:
    """How a command that does this ends."""
    return usage.command("a.command")(doing)()


def test_codes_are_passed_on_and_standard_output_is_put_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sys.stdout

    def doing() -> int:
        out = outputs.set_aside("-")
        print("said")
        outputs.write_json("-", {"a": 1}, out)
        return 1

    assert ended(doing) == 1 and sys.stdout is before
    assert capsys.readouterr() == ('{\n "a": 1\n}\n', "said\n")


def test_the_wrapper_shows_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def no_file() -> int:
        return len(Path("/nowhere/at/all").read_text())

    def refused() -> int:
        outputs.check_target("--json", "/nowhere/at/all")
        return 0

    assert (ended(no_file), ended(refused), ended(interrupt)) == (2, 2, 3)
    assert capsys.readouterr().err == (
        "a.command: /nowhere/at/all: No such file or directory\n"
        "a.command: --json /nowhere/at/all: its folder does not exist; make it first\n"
        "a.command: stopped before it was done\n"
    )


def test_other_errors_are_not_hidden() -> None:
    def wrong() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ended(wrong)


class Swallows:
    """Ctrl-C comes while one of these is being deleted."""

    def __del__(self) -> None:
        raise KeyboardInterrupt


@pytest.fixture
def heard() -> Iterator[None]:
    """Ctrl-C is heard, whatever whoever runs the tests has set (a shell's background job ignores it)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_that_python_cannot_raise_is_not_lost(heard: None, capsys: pytest.CaptureFixture[str]) -> None:
    def doing() -> int:
        Swallows()
        gc.collect()
        for _ in range(10**9):
            pass
        return 0

    assert ended(doing) == 3
    assert capsys.readouterr().err == "a.command: stopped before it was done\n"


def test_a_reader_that_left_early_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m spec.geometry --list | head -c 1",
        shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert len(done.stdout) == 1 and not done.stderr


def test_every_command_goes_through_the_wrapper() -> None:
    """A module that can be run has a ``main``, wrapped; two are processes that a command starts and stops."""
    children = ["impl/upstream/driver.py", "impl/upstream/statecopy.py"]
    missing = []
    for package in ("spec", "impl"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if '__name__ == "__main__"' in text and "@command(" not in text:
                missing.append(str(path.relative_to(ROOT)))
    assert missing == children


# -- a reader that leaves ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run that breaks an invariant."""
    path = tmp_path_factory.mktemp("usage") / "broken.trace"
    words = ["--policy", "fault:no-fence", "--config", "fences", "--record", str(path)]
    assert importlib.import_module("spec.walk").main(words) == 1
    return path


@pytest.mark.parametrize("output", ["| true", "| head -c 1", ">&-", ">&- 2>&-", "2>&1 | head -c 1"])
def test_a_verdict_is_the_same_whoever_reads(broken: Path, output: str, tmp_path: Path) -> None:
    """Nobody reads, one reader leaves, the output is closed: still 1, and the file."""
    file = tmp_path / "found.json"
    words = f"{sys.executable} -u -m spec.trace check {broken} --json {file} {output}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words}"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(file.read_text())["verdict"] == "refuted"


def test_what_is_written_after_the_reader_left_goes_nowhere() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        shown = usage.lasting(stream)
        print("said", file=shown, flush=True)
        print("and more", file=shown, flush=True)
    assert shown.left  # type: ignore[attr-defined]


def test_an_option_that_names_no_file_is_none() -> None:
    """``impl.upstream matrix --record`` is a switch."""
    parser = usage.OneLineParser(prog="matrix")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--json")
    assert parser.parse_args(["--record", "--json", "found.json"]).record is True
