"""Which planner made an answer? Its revision, a number that benchmarks write beside their rows.

A row of a table is worth keeping as long as the planner would give it again. The revision rises
when the planner's answers change, and not when its code moves or becomes faster. The test of this
module compares the frontiers of a few frozen programs with recorded ones. If they differ, raise the
number, and record the new frontiers as the test says.

Plans with ``pieces=True`` have revisions of their own beside it, because a change of the rules by
which segments run in pieces leaves all other plans as they were. There is one for each compiler,
since many of these rules are for one compiler alone.

Example: `benchmarks/ogc_table.py` computes a row again if its ``planner`` is not this revision.
"""

REVISION = 3

# Since 2, random bits are drawn in pieces. Since 3, the buffers of a loop over pieces depend on its
# inputs in half precision. Since 4, the plans without pieces are searched as if no others existed.
# Since 5, XLA's TPU compiler copies arguments again for the loop of the derivative. On CPUs and
# GPUs, predictions count what an array leaves unused of the memory of a result, and on GPUs also
# the sums of the gradients of kernels. Since 6, an array of constants that a loop over pieces reads
# is counted, and on TPUs the derivative of a loss of one sequence does not scatter. Since 7, sums
# of half precision are added up in float32, and on CPUs the gradients of products with batch
# dimensions are computed one by one. Since 8, predictions for GPUs count that an array may lie in
# the memory of a large gradient until the end, and since 9, no barrier in a region prevents it. On
# TPUs, neighbouring loops over images have equal numbers of pieces since 8. Since 8, 10 and 9, a
# prediction is corrected only by compiled plans that divide the program alike. On CPUs, since
# 9, the gradients of attention's weights and values wait for each other only where XLA does not
# fuse them.
PIECES_REVISIONS = {"cpu": 9, "cuda": 10, "tpu": 9}
