"""The command line as a whole: exit codes, errors in one line, help, what is imported, and life without the extras."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from k3comm import cli
from k3comm.cli import _console, _plots, tiers
from k3comm.errors import K3CommError, NegotiationError
from k3comm.tiers import Tier

ROOT = Path(cli.__file__).parents[2]


def k3comm(
    *arguments: str, encoding: str = "utf-8", variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`python -m k3comm`, as a user has it."""
    return subprocess.run(
        [sys.executable, "-X", "utf8=0", "-m", "k3comm", *arguments],
        cwd=ROOT,
        env={"PYTHONIOENCODING": encoding, **(variables or {})},
        capture_output=True,
        text=True,
        encoding=encoding,
        timeout=60,
    )


def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    return caught.value.code


def without(package: str) -> Callable[..., Exception | None]:
    """A stand-in for `import_failure` on a machine that lacks a package."""
    absent = ModuleNotFoundError(f"No module named {package!r}", name=package)
    return lambda *modules: absent if any(module.split(".")[0] == package for module in modules) else None


def broken(package: str, folder: Path) -> dict[str, str]:
    """The variables with which a package is there and fails when it is imported."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("raise RuntimeError('built for another numpy')\n")
    return {"PYTHONPATH": str(folder)}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code() == 2
    assert "COMMAND" in capsys.readouterr().err
    assert exit_code("tears") == 2
    assert "tiers" in capsys.readouterr().err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--help") == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {command} " in shown for command in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_states_every_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(command, "--help") == 0
    options = capsys.readouterr().out.partition("options:\n")[2].partition("examples:")[0]
    entries = options.replace("\n  -", "\n\0").split("\0")
    for entry in entries[1:]:
        name = entry.split()[0]
        switch = name.strip("-,") in ("h", "json", "sharded", "plot")
        assert switch or "(default:" in entry, f"{command}: {name} does not state its default"


def test_an_error_of_the_library_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: object) -> int:
        raise NegotiationError("the ranks can't agree\nspec.top_k differs: 8 on rank 0; 16 on rank 1")

    monkeypatch.setattr(tiers, "run", fail)
    assert cli.main(["tiers"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "k3comm: the ranks can't agree spec.top_k differs: 8 on rank 0; 16 on rank 1\n"


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiers, "run", interrupt)
    assert cli.main(["tiers"]) == 130
    assert capsys.readouterr().err == ""


def test_a_malformed_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("K3COMM_DISABLE", "TAIL_FUSIN")
    assert cli.main(["tiers", "--agreed", "TAIL_FUSION"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("k3comm: K3COMM_DISABLE")
    assert error.count("\n") == 1


def test_as_a_module() -> None:
    result = k3comm("tiers", "--agreed", "TAIL_FUSION", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["agreed"] == {"TAIL_FUSION": None, "SEPARATE_REDUCE": None}
    result = k3comm("replay", "/nowhere.csv")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("k3comm: /nowhere.csv: ")


def test_a_terminal_that_knows_only_ascii() -> None:
    result = k3comm("replay", encoding="ascii")
    assert (result.returncode, result.stderr) == (0, "")
    assert "TAIL_FUSION" in result.stdout


def test_a_name_that_the_terminal_does_not_know(tmp_path: Path) -> None:
    trace = tmp_path / "größe.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:00,300,3\n")
    result = k3comm("replay", str(trace), encoding="ascii")
    assert (result.returncode, result.stderr) == (0, "")
    assert r"gr\xf6\xdfe.csv" in result.stdout


@pytest.mark.parametrize("arguments", [["tiers", "--agreed", "TAIL_FUSION"], ["replay"], ["replay", "--json"]])
@pytest.mark.parametrize(
    ("redirection", "error"),
    [
        (">&-", "k3comm: standard output is closed\n"),
        (">/dev/full", "k3comm: standard output can't be written: No space left on device\n"),
    ],
)
@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
def test_an_output_that_takes_nothing(
    arguments: list[str], redirection: str, error: str, rich: bool, tmp_path: Path
) -> None:
    if rich:
        pytest.importorskip("rich")
    result = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "k3comm", *arguments],
        cwd=ROOT,
        env={} if rich else broken("rich", tmp_path),
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (2, error)


@pytest.mark.parametrize(("redirection", "code"), [(">&-", 2), (">/dev/full", 2)])
def test_help_that_nothing_takes(redirection: str, code: int) -> None:
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "k3comm", "replay", "--help"]
    result = subprocess.run(command, cwd=ROOT, env={}, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == code
    assert result.stderr.startswith("k3comm: standard output ")
    assert result.stderr.count("\n") == 1


def test_without_standard_error() -> None:
    result = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "k3comm", "replay", "/nowhere.csv"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (2, ""), "an error is no result"


def test_rich_that_is_broken_is_as_if_absent(tmp_path: Path) -> None:
    result = k3comm("tiers", "--agreed", "TAIL_FUSION", variables=broken("rich", tmp_path))
    assert (result.returncode, result.stderr) == (0, "")
    assert "-----------------" in result.stdout


def test_a_reader_that_leaves_early() -> None:
    program = "import sys; from k3comm.cli import main; sys.exit(main(['replay', '--json']))"
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_the_pure_commands_load_no_torch() -> None:
    program = """
import sys
from k3comm.cli import main
assert main(["tiers", "--agreed", "TAIL_FUSION"]) == 0
assert main(["replay", "--json"]) == 0
print([name for name in ("torch", "numpy", "matplotlib", "multiprocessing") if name in sys.modules], file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "[]\n")


# Tables


TABLE = _console.Table(
    title="Numbers", columns=["name", ">many"], rows=[["[one]", "1"], [_console.Cell("two", "red"), "22"]]
)


def test_plain_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_console, "import_failure", without("rich"))
    _console.show("[line]", TABLE)
    assert capsys.readouterr().out == "[line]\nNumbers\nname   many\n-----  ----\n[one]     1\ntwo      22\n\n"


def test_rich_tables_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    _console.show("[line]", TABLE)
    words = capsys.readouterr().out.replace("─", "").split()
    assert words == ["[line]", "Numbers", "name", "many", "[one]", "1", "two", "22"]


HOSTILE = "one\x1b[2J\r\x00\x9b1m\u202e\udc80\ttwo"
ESCAPED = r"one\x1b[2J\r\x00\x9b1m\u202e\udc80\ttwo"


@pytest.mark.parametrize("rich", [False, True])
def test_a_terminal_obeys_nothing_that_is_shown(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not rich:
        monkeypatch.setattr(_console, "import_failure", without("rich"))
    else:
        pytest.importorskip("rich")
    rows = [["a\nb", HOSTILE], [_console.Cell(HOSTILE), "2"]]
    table = _console.Table(title=HOSTILE, columns=["name", HOSTILE], rows=rows)
    _console.show(f"first\n{HOSTILE}", table)
    _console.complain(f"first\n{HOSTILE}")
    out, err = capsys.readouterr()
    lines = out.split("\n")
    assert all(line.isprintable() for line in lines)
    assert lines[:3] == ["first", ESCAPED, ESCAPED], "a text may have lines, a title has one"
    assert next(line.split()[0] for line in lines[3:] if line.strip()) == "name"
    assert sum(line.count(ESCAPED) for line in lines) == 5
    assert any(line.startswith(r"a\nb ") for line in lines)
    assert err == f"first\n{ESCAPED}\n"


def test_long_lines_reach_a_pipe_whole(capsys: pytest.CaptureFixture[str]) -> None:
    _console.show("word " * 100 + "end")
    assert capsys.readouterr().out.count("\n") == 1


def test_every_tier_has_a_colour() -> None:
    assert set(_console.COLOURS) == set(Tier)
    assert len(set(_console.COLOURS.values())) == len(Tier)


def test_verdicts_are_words_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert [str(_console.verdict_cell(good)) for good in (True, False)] == ["✓ ok", "✗ MISSED"]
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert [str(_console.verdict_cell(good)) for good in (True, False)] == ["ok", "MISSED"]


# Progress


def run_progress(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with _console.progress("working", 4) as advance:
        for _ in range(4):
            advance(1)
    return stream.getvalue()


def test_progress_needs_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_progress(monkeypatch, io.StringIO()) == ""
    assert capsys.readouterr().out == ""


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    assert "working" in run_progress(monkeypatch, Terminal())
    assert capsys.readouterr().out == ""


def test_progress_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_console, "import_failure", without("rich"))
    shown = run_progress(monkeypatch, Terminal())
    assert [part.strip() for part in shown.split("\r")] == [
        "", "working  25 %", "working  50 %", "working  75 %", "working 100 %", "", "",
    ]  # fmt: skip


def test_progress_that_fails_leaves_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_console, "import_failure", without("rich"))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = _console.progress("working", 4)
    bar.__enter__()(2)
    assert not bar.__exit__(K3CommError, K3CommError(), None)
    assert terminal.getvalue().split("\r")[-2].isspace()


# Plots


@pytest.mark.parametrize("command", ["tiers", "replay"])
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("map.gif", "accepted are files that end in .png, .svg, .pdf"),
        ("map", "accepted are files that end in .png, .svg, .pdf"),
        ("nowhere/map.png", "there is no folder"),
    ],
)
def test_a_plot_that_could_not_be_written_is_refused_first(
    command: str, name: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main([command, "--agreed", "TAIL_FUSION", "--plot", str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert error in captured.err


@pytest.mark.parametrize("command", ["tiers", "replay"])
def test_a_plot_without_matplotlib_names_the_extra(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_plots, "import_failure", without("matplotlib"))
    assert cli.main([command, "--agreed", "TAIL_FUSION", "--plot", str(tmp_path / "map.png")]) == 2
    assert "pip install 'k3comm[plot]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["tiers", "replay"])
def test_a_plot_with_a_broken_matplotlib_names_the_extra(command: str, tmp_path: Path) -> None:
    variables = broken("matplotlib", tmp_path)
    result = k3comm(command, "--agreed", "TAIL_FUSION", "--plot", str(tmp_path / "map.png"), variables=variables)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "k3comm: --plot needs matplotlib, which can't be imported (RuntimeError: built for another numpy): "
        "pip install 'k3comm[plot]'\n"
    )


@pytest.mark.parametrize("command", ["tiers", "replay"])
def test_empty_names_are_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--agreed", "TAIL_FUSION", "--plot", ""]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.startswith("k3comm: --plot")) == ("", True)
    assert exit_code(command, "--agreed", "TAIL_FUSION", "--family", "") == 2
    assert "--family: '' given; accepted are names of device families" in capsys.readouterr().err


def test_a_plot_that_is_refused_by_the_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "map.png").mkdir()
    assert cli.main(["tiers", "--agreed", "TAIL_FUSION", "--plot", str(tmp_path / "map.png")]) == 2
    assert "can't be written" in capsys.readouterr().err
