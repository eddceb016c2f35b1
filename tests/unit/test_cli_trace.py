"""Reading traces: the format, what is accepted of it, and errors that name file, line, value and what is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3comm.cli.trace import CITATION, COLUMNS, EXCERPT, Request, load_trace, packaged_trace, parse_trace
from k3comm.errors import InputError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AT = "2023-11-16 18:17:03.9799600"
DATA = Path(__file__).parents[2] / "k3comm" / "data"


def test_a_trace() -> None:
    trace = parse_trace(
        [HEADER, f"{AT},4808,10", "2023-11-16 18:17:04.0319600,3180,0", "", "2023-11-16 18:18:03,1,8"], "t"
    )
    assert trace.requests == (Request(0, 4808, 10), Request(52_000, 3180, 0), Request(59_020_040, 1, 8))
    assert (trace.source, trace.span, trace.moved) == ("t", 59_020_040, 0)


def test_what_is_accepted_besides() -> None:
    lines = [
        " TIMESTAMP , ContextTokens,GeneratedTokens",
        '"2024-05-10T00:00:01+02:00" , 007 ,"1"',
        ",,",
        "2024-05-09 22:00:02,1,1",
    ]
    trace = parse_trace(lines, "t")
    assert trace.requests == (Request(0, 7, 1), Request(1_000_000, 1, 1)), "no time zone is UTC"


def test_out_of_order_is_sorted_and_counted() -> None:
    seconds = (3, 1, 2, 3, 5, 4)
    trace = parse_trace([HEADER, *(f"2023-11-16 18:17:0{s},{i + 1},1" for i, s in enumerate(seconds))], "t")
    assert trace.moved == 3
    assert [request.arrival for request in trace.requests] == [0, 1_000_000, 2_000_000, 2_000_000, 3_000_000, 4_000_000]
    assert [request.prompt for request in trace.requests] == [2, 3, 1, 4, 6, 5], "equal times keep their order"


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], f"t: line 1: nothing given; accepted is the header {HEADER}"),
        ([""], f"t: line 1: nothing given; accepted is the header {HEADER}"),
        (["TIMESTAMP,ContextTokens"], "t: line 1: 'TIMESTAMP,ContextTokens' given; accepted is the header"),
        (["ContextTokens,TIMESTAMP,GeneratedTokens"], "t: line 1: 'ContextTokens,TIMESTAMP"),
        ([f"{AT},1,1"], f"t: line 1: '{AT},1,1' given"),
        ([HEADER], "t: no request after the header"),
        ([HEADER, "", ""], "t: no request after the header"),
        ([HEADER, f"{AT},1"], f"t: line 2: 2 fields given; accepted are the 3 of {HEADER}"),
        ([HEADER, f"{AT},1,1", f"{AT},1,1,1"], "t: line 3: 4 fields given"),
        ([HEADER, "", "yesterday,1,1"], "t: line 3: TIMESTAMP: 'yesterday' given; accepted are times like 2023-11-16"),
        ([HEADER, ",1,1"], "t: line 2: TIMESTAMP: '' given"),
        ([HEADER, f"{AT},1.5,1"], "t: line 2: ContextTokens: '1.5' given; accepted are whole numbers from 1 to 10"),
        ([HEADER, f"{AT},-1,1"], "t: line 2: ContextTokens: '-1' given"),
        ([HEADER, f"{AT},0,1"], "t: line 2: ContextTokens: '0' given; accepted are whole numbers from 1"),
        ([HEADER, f"{AT},1_000,1"], "t: line 2: ContextTokens: '1_000' given"),
        ([HEADER, f"{AT},٣,1"], "t: line 2: ContextTokens: '٣' given"),
        ([HEADER, f"{AT},1,"], "t: line 2: GeneratedTokens: '' given; accepted are whole numbers from 0"),
        ([HEADER, f"{AT},1,many"], "t: line 2: GeneratedTokens: 'many' given"),
        ([HEADER, f"{AT},1,10000001"], "t: line 2: GeneratedTokens: '10000001' given"),
        ([HEADER, f"{AT},{'9' * 5000},1"], "t: line 2: ContextTokens: '9999"),
        ([HEADER, f"{AT},1,{'x' * 200_000}"], "t: line 2: not CSV: field larger than field limit"),
    ],
)  # fmt: skip
def test_errors_name_the_place(lines: list[str], error: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_trace(lines, "t")
    assert str(caught.value).startswith(error)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbf" + f"{HEADER}\r\n{AT},3,2\r\n".encode())
    assert load_trace(path).requests == (Request(0, 3, 2),)
    assert load_trace(str(path)).source == str(path)
    path.write_bytes(f"{HEADER}\n{AT},3,2".encode("utf-16"))
    for bad, why in ((path, " as text: "), (tmp_path, ": Is a directory$"), (tmp_path / "none.csv", ": No such file")):
        with pytest.raises(InputError, match=f"can't be read{why}"):
            load_trace(bad)


def test_the_excerpt_that_ships() -> None:
    trace = packaged_trace()
    assert (len(trace.requests), trace.source, trace.moved) == (2000, EXCERPT, 0)
    assert trace.requests[0] == Request(0, 4808, 10)
    assert trace.requests[-1] == Request(853_079_347, 1697, 36)
    assert sum(request.prompt for request in trace.requests) == 3_973_157
    assert sum(request.generated for request in trace.requests) == 59_024
    assert (DATA / EXCERPT).read_text(encoding="utf-8").splitlines()[0] == ",".join(COLUMNS)


def test_the_excerpt_is_attributed() -> None:
    readme = (DATA / "README.md").read_text(encoding="utf-8")
    for needed in (
        EXCERPT,
        "Microsoft",
        "https://github.com/Azure/AzurePublicDataset",
        "Splitwise",
        "ISCA 2024",
        "2,000",
    ):
        assert needed in readme
    assert "https://creativecommons.org/licenses/by/4.0/" in readme
    for needed in ("Azure LLM inference trace 2023", "CC-BY 4.0", "https://github.com/Azure/AzurePublicDataset"):
        assert needed in CITATION
