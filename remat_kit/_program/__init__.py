"""What does a traced function compute: which equations, values, gradient and training step?

`program` flattens a jaxpr, `paths` finds the module of an equation, `ops` counts the bytes and
FLOPs of an equation, and `value` describes the results of an equation to the selectors of a policy.
`flow` numbers values so that equal values have equal numbers, and `structure` tells whether two
programs compute the same. `gradient` checks and traces the gradient of a loss, `derivative` splits
the derivative into a forward and a linear program, and `taken` tells whether a function takes a
gradient itself. `step` puts an optimizer around a loss, and `traced` traces the whole program that
is compiled. `builder` imports the function that an address such as ``models/gpt.py:build`` names.
"""
