"""How much memory and time does one checkpoint schedule of a loss need?

`build` traces a loss into the cost graph of `graph`: one equation for each operation, with its
FLOPs, its seconds and the arrays that its derivative reads, which `derivative` finds. `simulate`
predicts the peak memory and the extra work of a schedule on that graph. `divided` returns the cost
graph of a program in which segments run in pieces.

Example: a chain of four operations, each with a result of 1 MiB that the backward pass reads. The
schedule that saves everything has a peak of at least 4 MiB and no extra work. If the second and
the third operation are one region, the schedule saves 2 MiB in the forward pass, and the backward
pass computes both operations again.
"""
