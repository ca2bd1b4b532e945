"""Schemas like those of JSONSchemaBench, generated: the same ones for the same seed.

Its classes are mixed: function signatures (GlaiveAI), configuration files (Kubernetes,
JsonSchemaStore: deep, with definitions and references), events (Snowplow: many bounded strings and
numbers), and what people write by hand (GitHub: unions, patterns, formats, recursion, and keywords
that nobody supports).
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
NAMES = ("id", "name", "kind", "tags", "spec", "größe", "a b", 'q"t', "x-y", "count", "next", "é")
FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "hostname", "duration")
PATTERNS = ("^[a-z]{2,5}$", "^\\d{3}-\\d{2}$", "^(GET|POST|PUT)$", "[0-9]", "^x[^y]*z$", "^$|^a+$")
# Keywords that are hard or impossible to enforce while text is written.
HARD: tuple[Schema, ...] = (
    {"uniqueItems": True, "type": "array", "items": {"type": "integer"}},
    {"not": {"type": "string"}},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "array", "contains": {"const": 3}},
    {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "integer"}},
    {"type": "object", "minProperties": 2},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
)


def schema(seed: int) -> Schema:
    """The schema of a number."""
    return _Generator(random.Random(seed)).root()


class _Generator:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names: list[str] = []  # of definitions

    def root(self) -> Schema:
        rng = self.rng
        definitions: dict[str, Schema] = {}
        for i in range(rng.choice([0, 0, 0, 1, 2])):  # each may refer to those before it
            definitions[f"D{i}"] = self.any(2)
            self.names = list(definitions)
        if rng.random() < 0.12:
            self.names.append("Tree")
            definitions["Tree"] = {
                "type": "object",
                "properties": {
                    "v": self.scalar(),
                    "sub": {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "maxItems": 2},
                },
                "required": ["v"],
                "additionalProperties": False,
            }
        found = self.object(3) if rng.random() < 0.8 else self.any(3)
        if definitions:
            found["$defs"] = definitions
        if rng.random() < 0.3:
            found["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        if rng.random() < 0.3:
            found["title"], found["description"] = "T", "what it is"
        return found

    def any(self, depth: int) -> Schema:
        rng, draw = self.rng, self.rng.random()
        if draw < 0.02:
            return dict(rng.choice(HARD))
        if self.names and draw < 0.15:
            return {"$ref": f"#/$defs/{rng.choice(self.names)}"}
        if depth <= 0 or draw < 0.5:
            return self.scalar()
        if draw < 0.7:
            return self.object(depth - 1)
        if draw < 0.85:
            return self.array(depth - 1)
        return self.union(depth - 1)

    def object(self, depth: int) -> Schema:
        rng = self.rng
        names = rng.sample(NAMES, rng.randint(0, 5))
        found: Schema = {"type": "object", "properties": {n: self.any(depth) for n in names}}
        if names and rng.random() < 0.8:
            found["required"] = rng.sample(names, rng.randint(0, len(names)))
        draw = rng.random()
        if draw < 0.6:
            found["additionalProperties"] = False
        elif draw < 0.75:
            found["additionalProperties"] = self.scalar()
        if rng.random() < 0.05:
            found["patternProperties"] = {"^p_[a-z]{1,4}$": self.scalar()}
        return found

    def array(self, depth: int) -> Schema:
        rng = self.rng
        found: Schema = {"type": "array", "items": self.any(depth)}
        if rng.random() < 0.5:
            found["minItems"] = rng.randint(0, 2)
        if rng.random() < 0.7:
            found["maxItems"] = found.get("minItems", 0) + rng.randint(0, 3)
        if rng.random() < 0.15:
            found["prefixItems"] = [self.scalar() for _ in range(rng.randint(1, 2))]
        return found

    def union(self, depth: int) -> Schema:
        rng = self.rng
        draw = rng.random()
        if draw < 0.5:
            return {"anyOf": [self.any(depth) for _ in range(rng.randint(1, 3))]}
        if draw < 0.75:  # told apart by a constant
            kinds = rng.sample(("a", "b", "c"), 2)
            return {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {"kind": {"const": kind}, "value": self.scalar()},
                        "required": ["kind"],
                        "additionalProperties": False,
                    }
                    for kind in kinds
                ]
            }
        if draw < 0.9:
            return {"type": rng.sample(("string", "integer", "null", "boolean"), 2)}
        return {"allOf": [self.object(0), {"type": "object", "required": []}]}

    def scalar(self) -> Schema:
        rng = self.rng
        kind = rng.choice(("string", "string", "integer", "number", "boolean", "null", "enum"))
        if kind == "enum":
            values = ["red", "grün", 3, -1.5, None, True, "", 'a"b', [1], {"k": 0}]
            return {"enum": rng.sample(values, rng.randint(1, 4))}
        if kind == "string":
            return {"type": "string", **self.string()}
        if kind in ("integer", "number"):
            return {"type": kind, **self.number(kind)}
        return {"type": kind}

    def string(self) -> Schema:
        rng, draw = self.rng, self.rng.random()
        if draw < 0.3:
            least = rng.randint(0, 4)
            return {"minLength": least, "maxLength": least + rng.randint(0, 8)}
        if draw < 0.5:
            return {"pattern": rng.choice(PATTERNS)}
        if draw < 0.65:
            return {"format": rng.choice(FORMATS)}
        return {}

    def number(self, kind: str) -> Schema:
        rng, draw = self.rng, self.rng.random()
        if draw < 0.4:
            return {}
        low = rng.randint(-200, 200) if kind == "integer" else rng.choice([-2.5, 0, 0.125, 1e3])
        if draw < 0.6:
            return {"minimum": low, "maximum": low + rng.randint(0, 90)}
        if draw < 0.75:
            return {"exclusiveMinimum": low, "exclusiveMaximum": low + rng.randint(2, 90)}
        if draw < 0.85 and kind == "integer":
            return {"multipleOf": rng.choice([2, 5, 10])}
        return {"minimum": low}
