"""A traced function: its program, its values, its gradient and the step around it.

`program` makes a jaxpr flat, `paths` names the module of an equation, `ops` counts its bytes and
FLOPs, and `value` describes its results as selectors see them. `flow` numbers values so that equal
numbers are equal values; `structure` tells whether two programs are the same. `gradient` checks and
traces the gradient of a loss, `derivative` splits it into a forward and a linear program, `taken`
finds out whether a function has taken a gradient itself, `step` adds an optimizer, and `traced` is
the whole program that a compiler is given. `builder` finds the function that an address such as
``models/gpt.py:build`` names.
"""
