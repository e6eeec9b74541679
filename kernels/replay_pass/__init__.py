"""The compiled lane: ordinary events of a batch in one pass over its columns; it stops before whatever is unusual."""
