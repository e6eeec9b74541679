"""`report.html`: one file that shows a report, offline, bounded in size however large the trace."""
