"""DuckDB and Polars over traces and reports: relations, macros, sessions, and the questions of triage."""
