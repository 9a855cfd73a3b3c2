"""Read a compiled program: its schedule, its memory and its time.

`hlo` parses the optimized program. `duplicates` finds the operations that the program computes
twice. `liveness` walks the schedule and computes the live bytes at each step. `peak` says which
buffers are live at the step with the most bytes. `roofline` estimates the time of a training step.
"""
