"""The simulator against the real engine: calibrated on the steps of one run, it predicts another.

Other requests are recorded before and after the run that is to be predicted (a machine's speed
drifts), a few at a time and all at once, and the cost model is fitted to them. Prints total time
and mean batch, real and simulated, and last one JSON line. `--steps FILE` keeps the steps recorded
before, for `octavo calibrate`. On a CPU, where the engine has one thread here, seconds are those of
the process: other programs do not count.

    python benchmarks/simulated.py                                         # a small model, CPU
    python benchmarks/simulated.py --config opt-13b --device cuda --gpu h200 --num-prompts 1000
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, process_time

from octavo.bench.throughput import Decoding, ThroughputReport, run_throughput
from octavo.bench.traces import TraceRequest, read_trace
from octavo.config import EngineConfig, make_config
from octavo.engine.engine import Engine
from octavo.engine.local_client import LocalClient
from octavo.llm import load_engine
from octavo.simulation.calibration import calibrate
from octavo.simulation.config import SimulationConfig
from octavo.simulation.report import calibration_text
from octavo.simulation.result import SimulationResult
from octavo.simulation.run import simulate
from octavo.simulation.step_records import StepRecorder, computing_dtype, read_step_records

ROOT = Path(__file__).parent
GREEDY = Decoding(temperature=0.0)


@dataclass(frozen=True)
class Traffic:
    """All requests at once."""

    requests: list[TraceRequest]
    decoding: Decoding = GREEDY
    hash_block_size: int = 16


def main() -> None:
    args = parse()
    requests = [
        request
        for request in read_trace(ROOT / "traces" / f"bench_{args.trace}_1000.csv")
        if request.num_tokens <= args.max_model_len
    ]
    random.Random(0).shuffle(requests)
    predicted = requests[: args.num_prompts]
    # What calibrates must be other requests, or nothing would be predicted.
    others = requests[args.num_prompts :][: args.num_prompts]
    config = engine_config(args)
    engine = load_engine(config)
    engine.clock = process_time if args.device == "cpu" else perf_counter
    try:
        with tempfile.TemporaryDirectory() as folder:
            before, after = args.steps or Path(folder) / "before", Path(folder) / "after"
            run_throughput(
                LocalClient(engine), others[:4], GREEDY
            )  # kernels are compiled, memory is touched
            record(engine, others[: len(others) // 2], before, args.gpu)
            report = run_throughput(LocalClient(engine), predicted, GREEDY, seed=1)
            record(engine, others[len(others) // 2 :], after, args.gpu)
            setting, records = read_step_records(before)
            calibration = calibrate(setting, records + read_step_records(after)[1])
        print(calibration_text(calibration))
        result = simulate(
            calibration.apply(simulation_config(engine, config, args.gpu)), Traffic(predicted)
        )
    finally:
        engine.executor.shutdown()
    compare(report, result, args)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="llama-15m", help="a folder in benchmarks/configs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gpu", default="cpu", help="as `octavo simulate` knows the device")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--trace", default="sharegpt", choices=("sharegpt", "alpaca"))
    parser.add_argument("--num-prompts", type=int, default=60)
    parser.add_argument("--num-blocks", type=int, default=500)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--memory-policy", default="paged")
    parser.add_argument("--steps", type=Path)
    args = parser.parse_args()
    if args.num_prompts < 18:
        parser.error("--num-prompts: at least 18 are needed to calibrate with")
    return args


def engine_config(args: argparse.Namespace) -> EngineConfig:
    options = {"num_threads": 1} if args.device == "cpu" else {}
    return make_config(
        str(ROOT / "configs" / args.config),
        load_format="dummy",
        device=args.device,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        num_blocks=args.num_blocks,
        memory_policy=args.memory_policy,
        enable_prefix_caching=False,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=2560,
        preemption_mode="recompute",
        **options,
    )


def record(engine: Engine, requests: list[TraceRequest], steps: Path, gpu: str) -> None:
    """Batches of all sizes: the requests a few at a time, and then all at once."""
    with StepRecorder(engine, steps, gpu, clock=engine.clock):
        for size in (1, 4, 8):
            run_throughput(LocalClient(engine), requests[size : 2 * size], GREEDY)
        run_throughput(LocalClient(engine), requests, GREEDY)


def simulation_config(engine: Engine, config: EngineConfig, gpu: str) -> SimulationConfig:
    """The same engine, on a virtual clock; with as many blocks as the real one has."""
    dtype = computing_dtype(config, engine.model_config)
    return SimulationConfig(
        config.model,
        gpu,
        dtype=dtype,  # type: ignore[arg-type]
        max_model_len=config.max_model_len,
        memory_share=1.0,
        workspace=0,
        cache=replace(config.cache, num_blocks=engine.executor.capacity.num_blocks),
        scheduler=config.scheduler,
        overlap=engine.executor.is_asynchronous if config.overlap is None else config.overlap,
    )


def compare(report: ThroughputReport, result: SimulationResult, args: argparse.Namespace) -> None:
    rows = {
        "seconds": (report.seconds, result.seconds),
        "steps": (report.num_steps, len(result.steps)),
        "mean batch": (report.mean_seqs, result.mean_batched_sequences),
    }
    print(f"\n{'':<12}{'real':>12}{'simulated':>12}{'error':>9}")
    for name, (real, simulated) in rows.items():
        print(f"{name:<12}{real:>12.2f}{simulated:>12.2f}{100 * (simulated / real - 1):>+8.1f}%")
    values = {name: {"real": real, "simulated": got} for name, (real, got) in rows.items()}
    settings = {name: str(value) for name, value in vars(args).items()}
    print(json.dumps({"benchmark": "simulated", "settings": settings} | values))


if __name__ == "__main__":
    main()
