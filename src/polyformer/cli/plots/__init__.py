"""Pictures and pages that show models, patterns and position schemes."""
