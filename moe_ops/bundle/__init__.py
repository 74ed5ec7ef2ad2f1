"""Bundles of what a process compiled: one file, which another process loads in place of compiling.

`archive` is the file, `key` says for which machine and versions it is, `places` where caches lie
and what of them this process uses, `warm` has `save_warm` and `load_warm`.
"""
