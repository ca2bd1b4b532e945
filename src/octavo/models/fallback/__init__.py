"""Models that transformers' own modules compute, through octavo's paged attention."""
