"""Ways of computing one `Request`: each module has `refuses(request, return_lse)` and `run(request)`."""
