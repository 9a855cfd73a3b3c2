"""How a policy is applied to a program and run.

`decorate` is the decorator that users call. `blocks` cuts a program into regions by module path,
`region` runs one region, `labels` chooses and names the values that a region keeps, `scans` runs
a scan in one or several loops, `run_schedule` runs a plan, and `void` says why a policy has no
effect.
"""
