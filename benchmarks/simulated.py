"""The simulator compared with the real engine: calibrated on one run, it predicts another.

The cost model is fitted to steps of other requests, run a few at a time and all at once. They are
recorded both before and after the predicted run, because a machine's speed drifts. Prints total
time and mean batch size, real and simulated, and one JSON line at the end. `--steps FILE` keeps the
steps recorded before the predicted run, for `octavo calibrate`. On a CPU the engine has one thread
here, and times are CPU seconds of the process, so that other programs do not count.

    python benchmarks/simulated.py                                         # a small model, CPU
    python benchmarks/simulated.py --config opt-13b --device cuda --gpu h200 --num-prompts 1000
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time

from octavo.bench.tables import show
from octavo.bench.throughput import Decoding, ThroughputReport, run_throughput
from octavo.bench.traces import HASH_BLOCK_SIZE, TraceRequest, read_trace
from octavo.config import EngineConfig, make_config
from octavo.engine.engine import Engine
from octavo.engine.local_client import LocalClient
from octavo.llm import load_engine
from octavo.simulation.calibration import calibrate
from octavo.simulation.config import SimulationConfig
from octavo.simulation.report import calibration_tables
from octavo.simulation.result import SimulationResult
from octavo.simulation.run import simulate
from octavo.simulation.step_records import StepRecorder, read_step_records
from octavo.simulation.workloads import Workload

ROOT = Path(__file__).parent
GREEDY = Decoding(temperature=0.0)


def main() -> None:
    args = parse()
    requests = [
        request
        for request in read_trace(ROOT / "traces" / f"bench_{args.trace}_1000.csv")
        if request.num_tokens <= args.max_model_len
    ]
    random.Random(0).shuffle(requests)
    predicted = requests[: args.num_prompts]
    # Calibrating on the predicted requests would predict nothing, so others are used.
    others = requests[args.num_prompts :][: args.num_prompts]
    config = engine_config(args)
    engine = load_engine(config)
    engine.clock = process_time if args.device == "cpu" else perf_counter
    try:
        with tempfile.TemporaryDirectory() as folder:
            before, after = args.steps or Path(folder) / "before", Path(folder) / "after"
            # Compile kernels and touch memory.
            run_throughput(LocalClient(engine), others[:4], GREEDY)
            record(engine, others[: len(others) // 2], before, args.gpu)
            report = run_throughput(LocalClient(engine), predicted, GREEDY, seed=1)
            record(engine, others[len(others) // 2 :], after, args.gpu)
            setting, records = read_step_records(before)
            calibration = calibrate(setting, records + read_step_records(after)[1])
        show(*calibration_tables(calibration))
        result = simulate(
            calibration.apply(simulation_config(engine, config, args.gpu)),
            Workload(tuple(predicted), GREEDY, HASH_BLOCK_SIZE),
        )
    finally:
        engine.executor.shutdown()
    compare(report, result, args)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="llama-15m", help="a directory in benchmarks/configs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gpu", default="cpu", help="the device's name in `octavo simulate`")
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
    """Record batches of all sizes: the requests a few at a time, then all at once."""
    with StepRecorder(engine, steps, gpu, clock=engine.clock):
        for size in (1, 4, 8):
            run_throughput(LocalClient(engine), requests[size : 2 * size], GREEDY)
        run_throughput(LocalClient(engine), requests, GREEDY)


def simulation_config(engine: Engine, config: EngineConfig, gpu: str) -> SimulationConfig:
    """The same engine on a virtual clock, with as many blocks as the real one has."""
    dtype = engine.config.dtype_for(engine.model_config.dtype)
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
