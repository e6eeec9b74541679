"""The commands of the analysis: kvcanary sql, kvcanary triage."""
