-- One row a violation and forward, as in violations.parquet (docs/replay.md); its column "group" is pool_group here, and number
-- is the row's number in the file.
select * from raw_violations
