"""Backends that compute a `Request`: each module has `refuses(request)` and `run(request)`."""
