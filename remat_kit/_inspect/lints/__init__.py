"""Lints: what looks wrong in the memory and the time of a gradient, each with a fix.

`scene` holds the information that every lint reads. `copies`, `regions` and `rules` define the
lints, grouped by what they look at, and `lint` runs all of them.
"""
