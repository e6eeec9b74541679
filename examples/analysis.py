# %% [markdown]
# # From a faulty trace to the cause
#
# A notebook in the percent format: open it in Jupyter (with jupytext), VS Code or PyCharm, or run it as a script:
# `python examples/analysis.py [TRACE]`. It replays a trace from `data/`, in which one entry of a request's block
# table points into another request's slots, and finds that out.

# %%
import sys
import tempfile
from pathlib import Path

import polars as pl
from kvcanary import ReplaySettings, open_report, replay

trace = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "data" / "table_swap.arrow"
folder = Path(tempfile.mkdtemp()) / "trace.report"
folder.mkdir()
summary = replay(trace, settings=ReplaySettings(), report=folder)
print(summary.verdict.value, summary.violations, "violations")

# %% [markdown]
# Where does it begin? `sql` gives a `pyarrow.Table`, `polars` a data frame.

# %%
report = open_report(folder)
print(report.polars("from first_bad_forward()"))

# %% [markdown]
# How far did it spread?

# %%
print(report.polars("from blast_radius()"))

# %% [markdown]
# Stored against expected, slot by slot: the tokens of another request stand there.

# %%
damaged = report.polars("select slot, position, stored_token, expected_token, request, writer_request from violations")
print(damaged.unique(maintain_order=True))
print(damaged.group_by("request", "writer_request").agg(pl.col("slot").n_unique().alias("slots")))

# %% [markdown]
# The life of the first damaged slot, and what the recorder saw change in the block table before that forward.

# %%
first = report.sql("from first_damage").to_pylist()[0]
print(report.polars(f"from slot_history({first['slot']}, in_group := {first['pool_group']})"))
print(report.polars(f"from table_changes where event = {first['event']}"))

# %% [markdown]
# And what the trace does not know.

# %%
print(report.polars("from lost"))
report.close()
