"""State hash: one number of all that is looked at of a slot of recurrent state."""
