"""What each compiler does to a program, and how remat_kit accounts for it.

`interface` declares the rates of a chip that the planner reads. `fusion` predicts which arrays a
compiler writes to memory. `cpu` holds facts about XLA's CPU compiler only. `rewrites` and
`barriers` change a program so that a compiler does not undo the decisions of a policy; the values
and derivatives of the program stay the same.
"""
