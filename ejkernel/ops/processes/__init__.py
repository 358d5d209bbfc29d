"""Many processes, one choice."""
