"""An endpoint from outside the package, as docs/extending.md describes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from octavo.outputs import RequestOutput, SequenceDelta
from octavo.server.http.app import create_app
from octavo.server.http.batch import post
from octavo.server.http.bodies import Integer
from octavo.server.http.context import Context
from octavo.server.http.dialect import Dialect, Writer, in_order
from octavo.server.http.generation import GenerationBody, Params, generation_params
from octavo.server.http.replies import Usage
from octavo.server.http.schema import documented
from octavo.server.http.settings import ServerSettings
from server.clients import run, symbolic_client
from server.symbolic_engine import expected_tokens

# ---------------------------------------------------------------- the module

router = APIRouter(tags=["Counting"])


class CountBody(GenerationBody):
    """POST /count: a number instead of a prompt."""

    number: Annotated[int, Integer(1, 999)]
    """The only token."""


class Count(msgspec.Struct, kw_only=True):
    id: str
    samples: list[list[int]]
    usage: Usage | UnsetType | None = UNSET


class CountWriter(Writer[CountBody, list[int]]):
    id_prefix = "count-"

    def whole(self, outputs: Sequence[RequestOutput]) -> Count:
        [output] = outputs
        samples = [each.token_ids for each in in_order(output)]
        self.num_output_tokens = sum(map(len, samples))
        return Count(id=self.id, samples=samples, usage=self.usage())

    def chunk(self, choices: list[list[int]]) -> Count:
        return Count(id=self.id, samples=choices)

    def delta_choices(self, prompt: int, delta: SequenceDelta) -> list[list[int]]:
        self.num_output_tokens += len(delta.token_ids)
        return [delta.token_ids]

    def beam_choices(self, prompt: int, output: RequestOutput) -> list[list[int]]:
        return [each.token_ids for each in in_order(output)]


def count_params(body: CountBody, defaults: Mapping[str, Any]) -> Params:
    return generation_params(body, defaults, body.max_tokens or 4, None)


async def prompts(context: Context, body: CountBody) -> list[list[int]]:
    return [[body.number]]


DIALECT = Dialect(CountBody, count_params, prompts, CountWriter, {"prompt": "number"})


@router.post("/count", **documented(CountBody, Count, example={"number": 5}, streams=Count))
async def count(request: Request) -> Response:
    """Continue a number."""
    return await DIALECT.respond(request)


# ---------------------------------------------------------------- its tests


def test_an_endpoint_from_outside_is_one_module_and_one_argument() -> None:
    async def test() -> None:
        async with symbolic_client() as client:
            app = create_app(client, ServerSettings(("demo",)), routers=[router])

            async def ask(**fields: Any) -> tuple[int, bytes]:
                body = {"number": 5.0, "ignore_eos": True, "seed": 3} | fields
                status, _, data = await post(app, "/count", json.dumps(body).encode())
                return status, data

            expected = [expected_tokens([5], 3, index, 4) for index in range(2)]
            status, data = await ask(n=2)
            reply = json.loads(data)
            assert (status, reply["samples"]) == (200, expected)
            assert reply["usage"]["completion_tokens"] == 8

            status, data = await ask(stream=True, stream_options={"include_usage": True})
            *events, done = data.decode().strip().split("\n\n")
            assert (status, done) == (200, "data: [DONE]")
            chunks = [json.loads(each.removeprefix("data: ")) for each in events]
            tokens = [token for chunk in chunks for each in chunk["samples"] for token in each]
            assert tokens == expected[0]
            assert chunks[-1]["usage"]["completion_tokens"] == 4

            for fields, param, words in (
                ({"number": 1000}, "number", "less than or equal to 999, not 1000"),
                ({"number": None}, "number", "it is missing"),
                ({"numbr": 5}, "numbr", "did you mean number?"),
                ({"temperature": 3}, "temperature", "less than or equal to 2, not 3"),
                ({"model": "gpt-0"}, "model", "not served"),
                ({"best_of": 2}, "best_of", "use n"),
            ):
                status, data = await ask(**fields)
                error = json.loads(data)["error"]
                assert (status in (400, 404), error["param"]) == (True, param)
                assert words in error["message"]

            description = app.openapi()
            assert "/v1/completions" in description["paths"]
            body = description["paths"]["/count"]["post"]["requestBody"]["content"]
            assert body["application/json"]["schema"] == {"$ref": "#/components/schemas/CountBody"}
            number = description["components"]["schemas"]["CountBody"]["properties"]["number"]
            assert (number["minimum"], number["maximum"]) == (1, 999)
            assert number["description"] == "The only token."
            assert "CountBody" in description["components"]["schemas"]
            assert client.open_requests == {}

    run(test())
