from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import deque
from pathlib import Path

import pytest

from octavo.bench.traces import TraceRequest, generate_prompts, make_prompts, read_trace
from octavo.errors import TraceError

SHIPPED = Path(__file__).parents[2] / "benchmarks/traces"


def test_shipped_traces_are_the_measured_ones() -> None:
    sharegpt = read_trace(SHIPPED / "bench_sharegpt_1000.csv")
    alpaca = read_trace(SHIPPED / "bench_alpaca_1000.csv")
    for requests, prompt, output in ((sharegpt, 148_021, 335_125), (alpaca, 18_703, 53_760)):
        assert len(requests) == 1000
        assert sum(request.prompt_tokens for request in requests) == prompt
        assert sum(request.output_tokens for request in requests) == output


def test_csv_with_arrivals_and_gzip(tmp_path: Path) -> None:
    text = "arrival_s,prompt_tokens,output_tokens\n0.5,10,20\n\n,3,4\n"
    plain, packed = tmp_path / "t.csv", tmp_path / "t.csv.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    expected = [TraceRequest(10, 20, 0.5), TraceRequest(3, 4, None)]
    assert read_trace(plain) == read_trace(packed) == expected
    assert read_trace(plain, limit=1) == expected[:1]


def test_jsonl_with_shared_blocks(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    rows = [
        {"arrival_s": 0, "prompt_tokens": 10, "output_tokens": 2, "hash_ids": [7, 8, 9]},
        {"arrival_s": 1, "prompt_tokens": 12, "output_tokens": 2, "hash_ids": [7, 8, 11]},
        {"prompt_tokens": 9, "output_tokens": 1, "hash_ids": [1], "tenant": "a"},
    ]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    requests = read_trace(path)
    assert requests[1].hash_ids == (7, 8, 11)
    assert [request.tenant for request in requests] == ["", "", "a"]
    first, second, third = make_prompts(requests, 1000, seed=3, hash_block_size=4)
    assert (len(first), len(second), len(third)) == (10, 12, 9)
    assert first[:8] == second[:8]
    assert first[8:] != second[8:10]
    assert make_prompts(requests, 1000, seed=3, hash_block_size=4)[0] == first


def test_prompts_of_a_long_trace_take_little_memory() -> None:
    """What is kept is packed, and nothing is made beyond the ends of prompts."""
    distinct = [
        TraceRequest(10_240, 1, hash_ids=tuple(range(n, n + 20))) for n in range(0, 800, 20)
    ]
    cut = TraceRequest(10, 1, hash_ids=tuple(range(100)))
    assert peak_bytes(distinct, 512) < 4 << 20
    assert peak_bytes([cut], 1 << 13) < 1 << 20


def peak_bytes(requests: list[TraceRequest], hash_block_size: int) -> int:
    tracemalloc.start()
    try:
        deque(generate_prompts(requests, 30_000, 0, hash_block_size), maxlen=0)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "prompt_tokens,output_tokens\n1,2\n3,x\n", ":3: output_tokens is 'x'"),
        ("t.csv", "prompt_tokens,output_tokens\n1,2\n\n0,2\n", ":4: prompt_tokens is '0'"),
        ("t.csv", "prompt_tokens,output_tokens\n1\n", ":2: 1 columns, but the header has 2"),
        ("t.csv", "prompts,outputs\n1,2\n", ":1: the header has no column prompt_tokens"),
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\nnan,1,2\n", ":2: arrival_s is 'nan'"),
        ("t.csv", "", ":1: the header has no column"),
        ("t.csv", "prompt_tokens,output_tokens\n", ": it has no requests"),
        ("t.jsonl", '{"prompt_tokens": 1, "output_tokens": 2}\n{"prompt', ":2: it is not JSON"),
        ("t.jsonl", "[" * 100_000, ":1: it is not JSON (maximum recursion depth exceeded"),
        ("t.jsonl", "[1, 2]\n", ":1: it is not a JSON object"),
        ("t.jsonl", '{"prompt_tokens": 1}\n', ":1: output_tokens is None"),
        (
            "t.jsonl",
            '{"prompt_tokens": 16777217, "output_tokens": 1}',
            ":1: prompt_tokens is 16777217, not an integer from 1 to 16,777,216",
        ),
        ("t.jsonl", '{"prompt_tokens": true, "output_tokens": 1}', ":1: prompt_tokens is True"),
        (
            "t.jsonl",
            '{"prompt_tokens": 1, "output_tokens": 1, "hash_ids": 3}',
            ":1: hash_ids is not a list",
        ),
        (
            "t.jsonl",
            '{"prompt_tokens": 1, "output_tokens": 1, "tenant": 3}',
            ":1: tenant is 3, not a string",
        ),
        (
            "t.jsonl",
            f'{{"prompt_tokens": 1, "output_tokens": 1, "arrival_s": {10**400}}}',
            ":1: arrival_s is about 2**1328, not a number of seconds",
        ),
        ("t.txt", "1 2\n", "a trace is a .csv or .jsonl file"),
        ("t.csv.gz", "not gzip", "cannot be read"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path: Path, name: str) -> None:
    text = "\ufeffprompt_tokens,output_tokens\n4,2\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert read_trace(tmp_path / name) == [TraceRequest(4, 2)]


def test_a_missing_or_damaged_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.csv")
    packed = gzip.compress(b"prompt_tokens,output_tokens\n" + b"1,2\n" * 5000)
    (tmp_path / "cut.csv.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match=r"cut\.csv\.gz: cannot be read"):
        read_trace(tmp_path / "cut.csv.gz")
    # A header without a name, and then a block of a kind that there is not.
    (tmp_path / "bad.csv.gz").write_bytes(packed[:10] + b"\xff" * 40)
    with pytest.raises(TraceError, match=r"bad\.csv\.gz: cannot be read"):
        read_trace(tmp_path / "bad.csv.gz")
