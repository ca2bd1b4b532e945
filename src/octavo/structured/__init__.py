"""Outputs that keep to a grammar: what may be asked for, and what enforces it. Loads no torch.

`output.py` checks what a client asks for, `schemas.py` what a JSON schema says about itself,
`constraint.py` is the seam to what enforces a grammar token by token, and `guidance.py` does so
with llguidance.
"""
