"""Compile programs for chips that need not be in this machine.

`catalogue` lists the chips, `topology` says how several of them are connected, and `target` finds
one by name. `lowering` converts a traced program to
bytes, `worker` is the process that compiles these bytes, `compile` sends them to the worker and
stores the answers in `cache`, and `memory` represents an answer.
"""
