"""Reports for the tests of the page, and what they read from a page."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
from kvcanary.analysis.store.sources import find_sources
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.run.replay import ReplaySettings, replay

from .hand_made import EVENTS, HEADER, event

HOSTILE = '</script><img src=x onerror="window.hurt=1">\'; drop table violations; --\u2028<!--'


def source_of(report):
    [source] = find_sources([report])
    return source


class PageParser(HTMLParser):
    """What a browser makes of a page: elements with their attributes, and the text of each script and style."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.code = []
        self._inside = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = dict(attrs) if tag in ("script", "style") else None
        if self._inside is not None:
            self.code.append((tag, dict(attrs), ""))

    def handle_data(self, data):
        if self._inside is not None:
            tag, attrs, text = self.code[-1]
            self.code[-1] = (tag, attrs, text + data)

    def handle_endtag(self, tag):
        self._inside = None


def data_of(page):
    [text] = [text for _, attrs, text in PageParser(page).code if attrs.get("id") == "report-data"]
    return json.loads(text)


def parts(value):
    """Every number and every table in a page's data."""
    if isinstance(value, dict):
        if "q" in value:
            yield value
            return
        for item in value.values():
            yield from parts(item)
    elif isinstance(value, list):
        for item in value:
            yield from parts(item)


def hostile_report(folder):
    """A report of a trace whose request, note, labels, group names and own name try to be markup."""
    name = re.sub(r"[/\u2028]", "_", HOSTILE)[:60]
    trace = folder / f"{name}.arrow"
    with TraceWriter(trace, HEADER) as writer:
        writer.append(event("request", {"request_id": 7, "name": HOSTILE, "prompt_len": 6, "labels": HOSTILE}))
        for item in EVENTS[1:11]:
            writer.append(item)
        writer.append(event("mark", {"note": HOSTILE, "labels": json.dumps({"fault": HOSTILE})}))
        for item in EVENTS[11:]:
            writer.append(item)
    report = folder / f"{name}.report"
    report.mkdir()
    replay(trace, settings=ReplaySettings(), report=report)
    findings = pq.read_table(report / "findings.parquet")
    row = {field.name: (HOSTILE if field.type == pa.utf8() else 5) for field in findings.schema}
    rows = [
        row | {"kind": "read_after_free", "forward": 1, "event": 4, "request_id": 7, "group": 0, "runner": 0, "slot": 9}
    ]
    made = pa.Table.from_pylist(rows, schema=findings.schema)
    pq.write_table(pa.concat_tables([findings, made]), report / "findings.parquet")
    return report


_SPAN = ("first_forward", "last_forward")  # findings have none


def grown_report(report, violations):
    """Turn a report's violations into many: other slots, forwards and requests; findings grow along."""
    for name, column in (("violations.parquet", "slot"), ("findings.parquet", "slot")):
        table = pq.read_table(report / name)
        want = violations if name == "violations.parquet" else violations // 20
        times = -(-want // table.num_rows)
        numbers = pa.array(np.repeat(np.arange(times), table.num_rows)[:want])
        grown = pa.concat_tables([table] * times).slice(0, want).combine_chunks()
        slots = pa.compute.add(grown[column], pa.compute.multiply(numbers, 7))
        later = pa.compute.multiply(numbers, 3)
        forwards = pa.compute.add(grown["forward"], later)
        requests = pa.compute.add(grown["request_id"], pa.compute.bit_wise_and(numbers, 1023))
        names = pa.compute.binary_join_element_wise("request", pa.compute.cast(requests, pa.utf8()), "-" * 40)
        for column_name, values in (
            ("slot", slots),
            ("forward", forwards),
            ("event", forwards),
            *((span, pa.compute.add(grown[span], later)) for span in _SPAN if span in grown.column_names),
            ("request_id", requests),
            ("request", names),
        ):
            at = grown.schema.get_field_index(column_name)
            grown = grown.set_column(at, grown.schema.field(at), pa.compute.cast(values, grown.schema.field(at).type))
        pq.write_table(grown, report / name)
