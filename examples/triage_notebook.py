# %% [markdown]
# # From a faulty trace to the cause
#
# A notebook in the percent format: open it in Jupyter (with jupytext), VS Code or PyCharm, or run it as a script:
# `python examples/triage_notebook.py [TRACE]`. It replays a trace from `data/`, of an engine that gave a page back while
# a request still read it, and finds that out. Every relation of `docs/reference/sql.md` is a lazy Polars frame.

# %%
import sys
import tempfile
from pathlib import Path

import polars as pl
import vl_convert
from kvcanary import ReplaySettings, open_report, replay
from kvcanary.analysis import finish

DATA = Path(__file__).parents[1] / "data"
trace = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA / "simulated" / "mla_free_too_early.arrow"
folder = Path(tempfile.mkdtemp()) / "trace.report"
folder.mkdir()
summary = replay(trace, settings=ReplaySettings(), report=folder)
finish(summary)  # groups what was found into incidents
report = open_report(folder, trace=trace)
print(summary.verdict.value, summary.violations, "violations")

# %% [markdown]
# What went wrong, since when, and what was seen first?

# %%
incidents = report.incidents.lazy().select("incident", "kind", "confidence", "first_forward", "sentence").collect()
print(incidents)
first = report.first_damage.lazy().collect().row(0, named=True)
print(first)

# %% [markdown]
# Who was hit, and whose tokens did they read?

# %%
violations = report.violations.lazy()
print(
    violations.group_by("request", "writer_request")
    .agg(pl.col("slot").n_unique().alias("slots"), pl.col("num_forwards").sum().alias("found"))
    .sort("found", descending=True)
    .collect()
)

# %% [markdown]
# The life of the first damaged slot: who had it, and when it was given back.

# %%
print(report.polars(f"from slot_history({first['slot']}, in_group := {first['pool_group']})"))

# %% [markdown]
# Damage by forward, over the tokens that the engine computed: a picture. Jupyter shows `chart` as it is.

# %%
load = report.forwards.lazy().select("forward", pl.col("num_tokens").alias("tokens"))
damage = report.damage_forwards.lazy().group_by("forward").agg(pl.len().alias("found"))
timeline = (
    load.join(damage, on="forward", how="left").with_columns(pl.col("found").fill_null(0)).sort("forward").collect()
)
x = {"field": "forward", "type": "quantitative"}
panels = [
    {"mark": "bar", "width": 640, "height": 90, "encoding": {"x": x, "y": {"field": name, "type": "quantitative"}}}
    for name in ("found", "tokens")
]
chart = {"data": {"values": timeline.to_dicts()}, "vconcat": panels}
picture = folder / "timeline.svg"
picture.write_text(vl_convert.vegalite_to_svg(chart))
print(picture)

# %% [markdown]
# And what the trace does not know.

# %%
print(report.lost.lazy().collect())
report.close()
