-- One row a violation and forward, as in violations.parquet (docs/replay.md); its column "group" is pool_group here.
select * from raw_violations
