"""How a step runs on one device."""
