"""Tuning what a program will call, before it runs, here or on other machines."""
