-- One row a pool group: kind, window, runner, block table, full-to-SWA table (-1: slots are the table's own), sizes.
select * from _pool_groups
