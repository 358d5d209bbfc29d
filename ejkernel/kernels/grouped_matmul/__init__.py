"""Backends of grouped products: the rows of each group are multiplied with the weights of the group."""
