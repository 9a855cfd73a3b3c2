"""What does a traced function compute: which equations, values, gradient and training step?

`program` flattens a jaxpr, `paths` finds the module of an equation, `ops` counts the bytes and
FLOPs of an equation, and `value` describes the results of an equation to the selectors of a policy.
`flow` numbers values so that equal values have equal numbers, and `structure` tells whether two
programs compute the same. `derivative` splits a derivative into a forward and a linear program.
`sharding` finds the part of each value that one device of a mesh has, and `communication` finds the
values that a collective makes. `pieces` has rules for running an equation on a piece of an axis.
`steps` finds and traces gradients, losses and training steps. `builder` imports the function that
an address such as ``models/gpt.py:build`` names.
"""
