"""Plain torch: what every other backend is compared with."""
