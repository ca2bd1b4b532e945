"""Models: descriptions of families, the decoder built from them, and the loader of weights."""
