"""Model families. A model file holds only what differs from its kin."""
