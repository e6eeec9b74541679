"""The toy engine of docs/guide/recording-your-engine.md: it runs as printed, and what it records is judged."""

import ast
from pathlib import Path

import pytest
from kvcanary.recorder.trace.reader import read_trace

from ..support.engines.documented_engine import judged, printed_code, run_code


def test_the_printed_engine_records_a_clean_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_code(printed_code())
    stats = names["engine"].recorder.stats()
    assert stats.off == "closed"
    assert stats.dropped_events == 0
    kinds = [event.kind for event in read_trace(tmp_path / "trace.arrow")]
    assert kinds.count("forward") == stats.forwards == 12
    assert kinds.count("request") == 2
    assert kinds.count("free") == 2
    summary = judged(tmp_path / "trace.arrow")
    assert summary.complete
    assert (summary.violations, summary.findings, summary.losses) == (0, 0, [])
    assert summary.verified > 0


def test_the_printed_engine_of_blocks_records_a_clean_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_code(printed_code("PagedEngine").replace("max_len=64,", "max_len=64, strict=True,"))
    assert names["engine"].recorder.stats().dropped_events == 0
    summary = judged(tmp_path / "paged.arrow")
    assert summary.verdict.value == "clean"
    assert summary.forwards == 13
    shared = [event for event in read_trace(tmp_path / "paged.arrow") if event.scalar("status") == "shared"]
    assert [event.ints("slot_count").sum() for event in shared] == [8]


class _WithoutRecorder(ast.NodeTransformer):
    """Takes the statements that speak to the recorder out of the engine."""

    removed = 0

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        if "self.recorder." in ast.unparse(node):
            self.removed += 1
            return None
        return node


def test_the_engine_itself_has_forty_lines() -> None:
    module = ast.parse(printed_code())
    engine = next(node for node in module.body if isinstance(node, ast.ClassDef))
    strip = _WithoutRecorder()
    bare = ast.unparse(strip.visit(engine))
    assert strip.removed == 4
    assert len([line for line in bare.splitlines() if line.strip()]) <= 40


def test_a_slot_that_is_still_in_use_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    broken = printed_code().replace(
        "while engine.requests:\n    engine.step()",
        "for step in range(30):\n"
        "    if step == 3:\n"
        "        engine.free_slots.insert(0, 2)\n"
        "    if engine.requests:\n"
        "        engine.step()",
    )
    assert "insert(0, 2)" in broken
    run_code(broken)
    summary = judged(tmp_path / "trace.arrow")
    assert summary.violations > 0
    assert summary.first_violation["slot"] == 2
    assert summary.first_violation["forward"] == 3
