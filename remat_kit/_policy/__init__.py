"""How does a user say which residuals to save, to offload and to recompute?

`algebra` defines decisions, selectors and policies with their operators. `selectors` defines the
selectors that users write, and `structural` the policies that also place regions. `reading` turns
whatever a user writes into a policy, and `recipe` reads presets and recipe files. `check` finds
patterns that match nothing in a program, `patterns` matches module paths and `regex` checkpoint
names, and `schedule` reads and writes the text of a plan.
"""
