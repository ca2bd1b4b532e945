"""What routers in front of the server send and ask: SGLang's, and Kubernetes' endpoint picker."""

from __future__ import annotations

import re
from typing import Any

import pytest

from server.live_server import LiveServer

# As sglang-router 0.3.2 sends them on, with what it adds.
COMPLETION = {
    **{"model": "demo", "prompt": "Once", "max_tokens": 2, "stream": False, "echo": False},
    **{"no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True},
    **{"return_hidden_states": False},
}
CHAT = {
    **{"messages": [{"role": "user", "content": "hi"}], "model": "demo", "logprobs": False},
    **{"max_completion_tokens": 3, "stream": False, "no_stop_trim": False, "ignore_eos": False},
    **{"continue_final_message": False, "skip_special_tokens": True},
    **{"separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False},
}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
def test_sglangs_router_sends_more_fields(
    server: LiveServer, path: str, body: dict[str, Any]
) -> None:
    assert server.post(path, body).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("no_stop_trim", True),
        ("return_hidden_states", True),
        ("return_hidden_states", 0),
        ("regex", "a+"),
        ("ebnf", "root ::= 'a'"),
        ("json_schema", "{}"),
        ("lora_path", "adapter"),
        ("session_params", {"id": "1"}),
    ],
)
def test_what_octavo_would_not_do_is_refused_by_name(
    server: LiveServer, field: str, value: object
) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        reply = server.post(path, {**body, field: value})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (
            *(400, field, "unsupported_field"),
        )


def test_what_a_router_asks_when_it_registers_a_server(server: LiveServer) -> None:
    info = server.get("/server_info").json()
    assert (info["served_model_name"], info["tp_size"], info["dp_size"]) == ("demo", 1, 1)
    assert info["max_total_num_tokens"] == 512 * 16
    assert info["num_replicas"] == 1
    model = server.get("/model_info").json()
    assert (model["served_model_name"], model["is_generation"]) == ("demo", True)
    assert model["model_path"] == info["model_path"] == "demo"


def test_metrics_of_the_model_server_protocol(server: LiveServer) -> None:
    """Of the Gateway API Inference Extension (docs/proposals/003-model-server-protocol)."""
    text = server.get("/metrics").text
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert f"# TYPE octavo_{name} gauge" in text
        [value] = re.findall(rf"^octavo_{name}{{[^}}]*}} (\S+)$", text, re.M)
        assert float(value) >= 0
    [labels] = re.findall(r"^octavo_cache_config_info{(.*)} 1.0$", text, re.M)
    assert 'block_size="16"' in labels
    assert 'num_gpu_blocks="512"' in labels
