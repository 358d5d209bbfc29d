"""What is on disk: entries, files, packs, merging, locks."""
