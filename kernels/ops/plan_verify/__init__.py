"""Plan and verify in one op, without the entries between them."""
