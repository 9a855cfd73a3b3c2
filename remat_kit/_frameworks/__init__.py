"""What remat_kit knows of the objects that users hand to it.

`flax` and `haiku` know how their modules carry state through a traced function, `classes` decorates
classes and callable pytrees such as Equinox modules, and `arguments` decides which leaves of a call
are traced and which are constants. These modules know nothing of policies.
"""
