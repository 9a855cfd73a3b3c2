"""What each compiler does to a program, and how remat_kit accounts for it.

`facts` lists what the compilers do, with the releases on which it was seen. `interface` answers
the questions of the planner about one compiler from these facts. `fusion` predicts which arrays a
compiler writes to memory. `rewrites` and `barriers` change a program so that a compiler does not
undo the decisions of a policy; the values and derivatives of the program stay the same.
"""
