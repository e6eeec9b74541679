"""The page that says where each column comes from: no column is left out, and it is up to date."""

import importlib.util
import sys
from typing import Any

import pytest
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.recorder.trace.schema import BYTE_LISTS, EVENT_KINDS, INT_LISTS, SCALARS

from ..support.places import ROOT


def _load() -> Any:
    """The script that makes the page; docs/ is no package."""
    spec = importlib.util.spec_from_file_location(
        "kvcanary_observed_page", ROOT / "docs" / "generate" / "observed_page.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their names
    spec.loader.exec_module(module)
    return module


PAGE = _load()
SOURCES = PAGE.Sources()
USES, ADAPTERS, EVERY = SOURCES.uses, SOURCES.adapters, PAGE.EVERY
TRACES = ("clean_hybrid.arrow", "sglang/kv_used_eagle_h200.arrow", "vllm/clean_hybrid_vllm.arrow")


def test_every_kind_and_every_column_of_the_schema_is_used_somewhere() -> None:
    assert set(USES) == set(EVENT_KINDS)
    used = {column for columns in USES.values() for column in columns} | set(EVERY)
    assert used == {*SCALARS, *INT_LISTS, *BYTE_LISTS}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_column_of_every_event_stands_in_an_adapters_table_once(adapter: str) -> None:
    assert SOURCES.missing(ADAPTERS[adapter]) == []
    assert {source.how for entries in ADAPTERS[adapter].values() for source in entries.values()} <= PAGE.HOW.keys()


def test_a_column_that_is_left_out_shows() -> None:
    assert "forward.positions" in SOURCES.missing(
        {"forward": {("input_ids",): next(iter(ADAPTERS["vLLM"]["forward"].values()))}}
    )


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "internals" / "observed.md").read_text(encoding="utf-8")
    assert page == SOURCES.page(), "run python docs/generate/observed_page.py"


@pytest.mark.parametrize(
    "trace", [*TRACES, *sorted(f"simulated/{path.name}" for path in (ROOT / "data/simulated").glob("*.arrow"))]
)
def test_traces_use_no_column_beyond_those_named(trace: str) -> None:
    for view in read_trace(ROOT / "data" / trace):
        used = {name for name, (_, default) in SCALARS.items() if view.scalar(name) != default} - set(EVERY)
        used |= {name for name in INT_LISTS if len(view.ints(name))}
        used |= {name for name in BYTE_LISTS if len(view.bytes(name))}
        assert used <= {*USES[view.kind]}, (view.kind, used - {*USES[view.kind]})


@pytest.mark.parametrize(
    ("adapter", "trace"),
    [("transformers", TRACES[0]), ("SGLang on a GPU", TRACES[1]), ("vLLM", TRACES[2])],
)
def test_what_is_not_recorded_is_in_no_trace_of_the_engine(adapter: str, trace: str) -> None:
    absent = {
        (kind, column)
        for kind, entries in ADAPTERS[adapter].items()
        for columns, source in entries.items()
        if source.how == "absent"
        for column in columns
        if column in INT_LISTS or column in BYTE_LISTS
    }
    for view in read_trace(ROOT / "data" / trace):
        for name in (column for kind, column in absent if kind == view.kind):
            values = view.ints(name) if name in INT_LISTS else view.bytes(name)
            assert set(values.tolist()) <= {-1}, (view.kind, name)
