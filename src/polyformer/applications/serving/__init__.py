"""A server with OpenAI's API: continuous batching, streams, limits. Needs the extra `serve`."""
