"""How the demo model was made: its grammars, its corpus, its training."""
