"""What all our Mosaic kernels for Hopper share: the chip, launching, clusters, matrix products."""
