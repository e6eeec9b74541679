-- One row a finding, as in findings.parquet (docs/replay.md and docs/checks.md); its column "group" is pool_group here.
select * from raw_findings
