"""How is a call with modules, classes and Python values turned into a function of arrays?

`flax` and `haiku` carry the state of these libraries' modules through a traced function. `classes`
decorates classes and callable pytrees, such as Equinox modules. `arguments` decides which leaves of
a call are traced and which are constants. Nothing in this subpackage depends on policies.
"""
