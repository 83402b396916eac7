"""Objectives: the mathematics of an update, in pure torch. A group is passed in where ranks share a vocabulary.

`build.py` turns `config.objective` into one. Nothing is imported here: the log-prob head needs torch alone.
"""
