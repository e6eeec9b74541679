"""`report.html`: one file that shows a report, offline, bounded in size however large the trace.

`content.py` asks the store and makes plain data of the answers, `document.py` puts data, styles, scripts and the plot
library into one file, `build.py` does both for a report folder.
"""
