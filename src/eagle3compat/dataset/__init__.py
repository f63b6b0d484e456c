"""Extracted hidden states on disk: what is wrong with them, what to redo, and the other generation's format."""
