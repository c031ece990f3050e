"""What everything else stands on: `attend` and its backends, patterns, context, state, configuration."""
