-- One row a block-table entry that was set: changed (the recorder saw another slot there) or written (a forward put its own
-- new token there). What an event changed is there before its forward reads the table, what the forward writes after it.
select event, forward, table_index, req_pool_idx, position, slot, 'changed' as how, trace from table_changes
union all
select event, forward, table_index, req_pool_idx, table_position, slot, 'written', trace from tokens
