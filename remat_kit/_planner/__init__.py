"""Which checkpoint schedule makes a training step the fastest within a memory budget?

`build` traces a loss into the cost graph of `graph`, with derivatives from `derivative`. `mincut`
chooses which activations a region saves, and `simulate` predicts the peak memory of a schedule.
`chain` divides the graph into blocks, and `compose` chooses how each block runs. `proposals`
collects schedules from all sources, and `bounds` computes lower bounds for all schedules.
`frontier` returns the best schedules, each as a `point`. `search` compiles a few of them for a
budget, and `plan` returns the best one as a policy. `revision` numbers the planner's answers.
"""
