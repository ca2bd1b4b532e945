"""Plain torch: the reference that every other backend is compared with."""
