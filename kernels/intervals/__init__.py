"""Which prefix positions a forward has to look at again: tables of cells, what invalidates them, and what settles them."""
