"""The interval executor: replay that looks at a prefix position again only after something it depends on changed."""
