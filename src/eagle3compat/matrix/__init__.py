"""What was measured, pair by pair: evidence of one cell, and the matrix that is built from all of it."""
