"""Which checkpoint schedule makes a training step the fastest within a memory budget?

`costs` predicts the memory and the time of a schedule, and `schedules` finds those that are worth
a closer look, with lower bounds for all of them. `frontier` returns the best schedules of a loss,
each as a `point`, and `steps` those of a whole training step. `search` compiles a few of them for a
budget, `plan` returns the best one as a policy, and `auto` does so at the first call of a function.
`revision` numbers the planner's answers.
"""
