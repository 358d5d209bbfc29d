"""Finding the best config: candidates, proving, racing, search, timers, workers."""
