"""Tuning a program's calls before it runs, here or on other machines."""
