"""Models of recorded episodes, tried in environments: returns asked for and achieved."""
