"""Many processes that agree on one config."""
