"""Backends of grouped products: rows of each group are multiplied with weights of their own."""
