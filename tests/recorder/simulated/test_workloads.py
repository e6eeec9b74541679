"""Workloads: random ones, and the published formats with everything that can be wrong with a line."""

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
from kvcanary.recorder.engines.simulated.config import WorkloadError
from kvcanary.recorder.engines.simulated.workloads import FileWorkload, RandomWorkload, block_tokens

GOOD = {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 6]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def jsonl(folder: Path, *entries) -> Path:
    path = folder / "w.jsonl"
    path.write_text("\n".join(e if isinstance(e, str) else json.dumps(e) for e in entries) + "\n")
    return path


def test_mooncake_equal_blocks_are_equal_tokens(tmp_path):
    other = {**GOOD, "timestamp": 2500, "hash_ids": [4, 5, 9]}
    first, second = FileWorkload(path=jsonl(tmp_path, GOOD, other), scale_time=0.5)
    assert (first.arrival_s, second.arrival_s) == (0.75, 1.25)
    assert len(first.prompt) == 1100
    assert first.max_new_tokens == 7
    assert np.array_equal(first.prompt[:1024], second.prompt[:1024])
    assert not np.array_equal(first.prompt[1024:], second.prompt[1024:])
    assert np.array_equal(first.prompt[512:1024], block_tokens(np.array([5]), seed=0, vocab_size=32_000))
    assert first.prompt.min() >= 0
    assert first.prompt.max() < 32_000


def test_seed_changes_tokens(tmp_path):
    path = jsonl(tmp_path, GOOD)
    prompts = [next(iter(FileWorkload(path=path, seed=seed))).prompt for seed in (0, 1)]
    assert not np.array_equal(*prompts)


def test_azure(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(
        AZURE + "2023-11-16 18:17:03.9799600,600,10\r\n2023-11-16 18:17:05.4799600,600,8\n",
        newline="",
        encoding="utf-8",
    )
    first, second = FileWorkload(path=path)
    assert (first.arrival_s, second.arrival_s) == (0.0, 1.5)
    assert (len(first.prompt), first.max_new_tokens) == (600, 10)
    assert not np.array_equal(first.prompt[:512], second.prompt[:512])


def test_fraction_and_limit(tmp_path):
    path = jsonl(tmp_path, *[GOOD] * 100)
    assert len(list(FileWorkload(path=path))) == 100
    assert len(list(FileWorkload(path=path, fraction=0.25))) == 25
    assert len(list(FileWorkload(path=path, limit=3))) == 3
    assert FileWorkload(path=path).longest() == 1107


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "timestamp"),
        ("[" * 100_000, "timestamp"),
        ("[1]", "timestamp"),
        ({**GOOD, "timestamp": -1}, "$.timestamp"),
        ({**GOOD, "timestamp": True}, "$.timestamp"),
        ({**GOOD, "timestamp": "1"}, "$.timestamp"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "invalid character (byte 14)"),
        ({**GOOD, "input_length": 0}, "$.input_length"),
        ({**GOOD, "input_length": 1 << 40}, "$.input_length"),
        ({**GOOD, "output_length": 1.5}, "$.output_length"),
        ({**GOOD, "hash_ids": [1, 2]}, "3 numbers"),
        ({**GOOD, "hash_ids": [1, 2]}, "came 2 entries"),
        ({**GOOD, "hash_ids": [1, 2, -3]}, "`int` >= 0 - at `$.hash_ids[2]`"),
        ({**GOOD, "hash_ids": [1, 2, "x"]}, "$.hash_ids"),
        ({**GOOD, "hash_ids": [1, 2, 1 << 70]}, "$.hash_ids"),
        ({**GOOD, "hash_ids": None}, "$.hash_ids"),
    ],
)
def test_bad_mooncake_lines_name_file_and_line(tmp_path, line, expected):
    path = jsonl(tmp_path, GOOD, line)
    with pytest.raises(WorkloadError, match=r"w\.jsonl: line 2: expected ") as error:
        list(FileWorkload(path=path))
    assert expected in str(error.value)
    assert len(str(error.value)) < 500 + len(str(path))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a,b,c\n", 1),
        (AZURE + "2023-11-16 18:17:03.97,1\n", 2),
        (AZURE + "yesterday,1,1\n", 2),
        (AZURE + "2023-11-16 18:17:03.97,x,1\n", 2),
        (AZURE + "2023-11-16 18:17:03.97,1,1\n2023-11-16 18:17:03.97,1,0\n", 3),
        (AZURE + "2023-11-16 18:17:03,1,1\n2023-11-16 18:17:03+00:00,1,1\n", 3),
        (AZURE + "\udcff\n", 2),
        (AZURE + "2023-11-16 18:17:03," + "1" * 200_000 + ",1\n", 2),
    ],
)
def test_bad_azure_lines_name_file_and_line(tmp_path, text, line):
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(WorkloadError, match=rf"a\.csv: line {line}: expected "):
        list(FileWorkload(path=path))


def test_endless_line_and_missing_file(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_bytes(b"[" * (1 << 21))
    with pytest.raises(WorkloadError, match=r"line 1: expected a line of less than"):
        list(FileWorkload(path=path))
    with pytest.raises(WorkloadError, match="cannot be read"):
        list(FileWorkload(path=tmp_path / "none.csv"))
    with pytest.raises(WorkloadError, match=r"expected a name that ends in \.jsonl"):
        FileWorkload(path=tmp_path / "w.parquet")


def test_a_pipe_is_refused(tmp_path):
    path = tmp_path / "w.jsonl"
    os.mkfifo(path)  # without anybody at its other end, for which a reader would wait
    with pytest.raises(WorkloadError, match="not a regular file; it is read twice"):
        FileWorkload(path=path).longest()


def test_random_workload_shares_prefixes_within_its_bounds():
    workload = RandomWorkload(requests=200, sharing=0.8, max_tokens=300, abort_rate=0.2, fork_rate=0.2, priorities=3)
    specs = list(workload)
    assert all(len(s.prompt) >= 1 and len(s.prompt) + s.max_new_tokens <= 300 for s in specs)
    assert [s.arrival_s for s in specs] == sorted(s.arrival_s for s in specs)
    assert {s.priority for s in specs} == {0, 1, 2}
    assert any(s.abort_at >= 0 for s in specs)
    assert any(s.copies > 1 for s in specs)
    heads = [tuple(s.prompt[:4]) for s in specs if len(s.prompt) >= 4]
    assert len(set(heads)) < 0.6 * len(heads)
    again = list(itertools.islice(workload, 5))
    assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(again, specs, strict=False))
