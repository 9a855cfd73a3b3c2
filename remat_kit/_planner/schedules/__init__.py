"""Which checkpoint schedules of a loss are worth a closer look?

`chain` divides a cost graph into blocks, and `compose` chooses by dynamic programming how each
block runs. `mincut` chooses which activations a region saves at a given price per byte. `pieces`
finds the segments that can run in pieces. `proposals` collects the schedules of all these sources
and discards those that another one beats, and `bounds` computes what every schedule needs at least.

Example: for a chain of 16 equal blocks, `proposals` returns among others the schedule that saves
everything, the one in which each block is a region, and the one in which regions of four blocks
contain regions of one block (Chen et al., 2016).
"""
