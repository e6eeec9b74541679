"""End hash: one number of what lies at one end of a copy of a page, all its layers together."""
