"""Finding the best config: candidates, checking, racing, search, timers, workers."""
