-- One row a captured KV stream, numbered among those of its runner as events number them.
select * from _streams
