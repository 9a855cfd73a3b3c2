"""Print answers: tables in a terminal, pictures, and the report as one HTML page."""
