-- One row a thing that a verdict might be taken to speak for: how much of it was watched, of how much, and why not all.
select * from _coverage
