"""What a model's answer consists of: text, reasoning and tool calls, read as the text comes.

`events.py` is the seam to whoever shows an answer, `template.py` a format as data, in transformers'
declarative form, `parser.py` reads a text by such a template, with `json_calls.py` for the calls
that are written in JSON and `values.py` for all other notations. `formats.py` has the formats that
come with octavo and finds the one of a model; `call_grammar.py` writes the grammar that keeps an
output to a format. Loads no torch.
"""
