"""One call of a region, as far as no framework is needed."""
