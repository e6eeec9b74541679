-- One row a finding, as in findings.parquet (docs/reference/replay.md and docs/reference/checks.md); its column "group" is pool_group here, and
-- number is the row's number in the file.
select * from raw_findings
