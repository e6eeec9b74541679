"""The incremental executor: replay that verifies a prefix position again only after something it depends on changed."""
