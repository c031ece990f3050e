"""Models of recorded episodes in environments: target returns and achieved returns."""
