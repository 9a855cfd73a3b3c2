"""Policies as values and as text.

`algebra` has decisions, selectors and policies with their operators; `selectors` has the selectors
that users write and `structural` the policies that also place regions. `reading` turns whatever a
user writes into a policy, `recipe` reads presets and recipe files, `check` finds patterns that
match nothing in a program, `patterns` matches module paths, and `schedule` is the text of a plan.
"""
