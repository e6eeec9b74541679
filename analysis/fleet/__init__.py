"""The replay of a fleet's recordings: found below a prefix, in tasks, on any number of machines, each result committed once."""
