"""guidellm: synchronous load on completions, with forced lengths and usage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = sys.argv[1:3]
NUM_REQUESTS, OUTPUT_TOKENS = 4, 8


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                str(Path(sys.executable).with_name("guidellm")),
                "run",
                *("--backend", f"kind=openai_http,target={URL},model=demo"),
                *("--profile", "kind=synchronous"),
                *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
                *("--tokenizer", f"kind=hf_auto,model={MODEL}"),
                "--data",
                f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}",
                *("--output", f"kind=json,path={folder}/report.json"),
            ],
            check=True,
            cwd=folder,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        report = json.loads(Path(folder, "report.json").read_text())
    requests = report["benchmarks"][0]["requests"]
    assert len(requests["successful"]) == NUM_REQUESTS, requests
    assert not requests["errored"]
    for each in requests["successful"]:
        assert each["output_metrics"]["text_tokens"] == OUTPUT_TOKENS, each
    print(f"{NUM_REQUESTS} requests of {OUTPUT_TOKENS} tokens")


if __name__ == "__main__":
    main()
