"""Selection of training samples by ids, expressions and weights. See docs/guides/select.md."""
