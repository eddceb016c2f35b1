"""benchmarks/tail_ranks.py without a GPU: what it accepts."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
ranks: Any = importlib.import_module("tail_ranks")


def test_choices() -> None:
    given = ranks.parser().parse_args(["--windows", "3x3,2x4", "--rows", "1,64", "--whole", "--shots"])
    assert (given.windows, given.rows, given.whole, given.isolated) == ([(3, 3), (2, 4)], [1, 64], True, False)
    assert given.shots
    plain = ranks.parser().parse_args([])
    assert (plain.windows, plain.rows) == ([], [1, 2, 4, 8, 16, 32, 64])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--windows", "3"], "'3' given; accepted are two numbers from 1"),
        (["--windows", "3x4294967296"], "'3x4294967296' given; accepted are two numbers from 1 to 256"),
        (["--windows", "3x0"], "'3x0' given; accepted are two numbers from 1"),
        (["--windows", "3x3,axb"], "'axb' given; accepted are two numbers from 1"),
        (["--rows", "0"], "'0' given; accepted are numbers from 1 to 64"),
        (["--rows", "1,65"], "'1,65' given; accepted are numbers from 1 to 64"),
        (["--rows", "some"], "'some' given; accepted are numbers from 1 to 64"),
    ],
)
def test_what_is_refused(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ranks.parser().parse_args(arguments)
    assert text in capsys.readouterr().err


def test_alone_it_says_how_it_is_started() -> None:
    command = [sys.executable, str(BENCHMARKS / "tail_ranks.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "torchrun" in done.stderr
    done = subprocess.run([*command, "--cells"], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "--cells given without --whole" in done.stderr
