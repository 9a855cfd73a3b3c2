"""Report which values a training step saves, and what it computes twice.

`residuals` and `recomputed` read the traced gradient; `reading` reads the compiled program.
`verdict` says whether each checkpoint region had an effect, and `whatif` predicts what another
choice would save. `report`, `tables` and `comparison` combine the answers. `diff` aligns two
gradient programs, `compare` compares two stored reports, and `lints` gives advice.
"""
