"""Backends that compute a `Request`: each module has `refuses(request, return_lse)` and `run(request)`."""
