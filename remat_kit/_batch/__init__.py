"""Find the batch sizes that fit: the largest one, or a table of chips, policies and sizes."""
