"""Train the demo model from nothing: tokenizer, model, export.

The corpus, its order and the first weights are fixed by the seed. A run that was stopped goes on
from its checkpoint, at the same step with the same rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo_demo.corpus import SKILLS
from octavo_demo.export import export
from octavo_demo.model import Llama, ModelShape
from octavo_demo.packing import WEIGHT_SHIFT, ShardSpec, make_shard, shards
from octavo_demo.tokenizer import train_tokenizer


@dataclass(frozen=True)
class TrainConfig:
    """Everything a run depends on."""

    shape: ModelShape = field(default_factory=ModelShape)
    steps: int = 10_000
    batch_rows: int = 64
    learning_rate: float = 2e-3
    warmup_steps: int = 200
    weight_decay: float = 0.1
    seed: int = 7
    tokenizer_documents: int = 30_000
    shard_rows: int = 512
    held_out_rows: int = 64
    evaluate_every: int = 1000
    checkpoint_every: int = 1000
    num_workers: int = 14
    compile: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError if steps would not divide a shard: which rows a step has would depend
        on where the run began, and a resumed one would have others."""
        if self.batch_rows < 1 or self.shard_rows % self.batch_rows:
            raise ValueError(f"{self.batch_rows} rows of a step do not divide {self.shard_rows}")


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to nothing."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def _batches(config: TrainConfig, spec: ShardSpec, first_step: int) -> Iterator[NDArray[np.uint16]]:
    """The rows of each step from `first_step` on."""
    steps_per_shard = config.shard_rows // config.batch_rows
    first_shard = first_step // steps_per_shard
    last_shard = -(-config.steps // steps_per_shard)
    skip = first_step - first_shard * steps_per_shard
    for shard in shards(spec, first_shard, last_shard - first_shard, config.num_workers):
        for start in range(skip * config.batch_rows, config.shard_rows, config.batch_rows):
            yield shard[start : start + config.batch_rows]
        skip = 0


def _tensors(rows: NDArray[np.uint16], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and weights of packed rows."""
    cells = torch.from_numpy(rows.astype(np.int32)).to(device, non_blocking=True)
    ids = (cells & ((1 << WEIGHT_SHIFT) - 1)).long()
    return ids[:, :-1], ids[:, 1:], (cells[:, 1:] >> WEIGHT_SHIFT).float()


class Trainer:
    """Owns the model, its optimizer and the step it has reached."""

    def __init__(self, config: TrainConfig, directory: Path, device: torch.device) -> None:
        self.config, self.directory, self.device = config, directory, device
        directory.mkdir(parents=True, exist_ok=True)
        self.tokenizer_path = directory / "tokenizer.json"
        if not self.tokenizer_path.exists():
            train_tokenizer(config.shape.vocab_size, config.tokenizer_documents).save(
                str(self.tokenizer_path), pretty=False
            )
        torch.manual_seed(config.seed)
        self.model = Llama(config.shape).to(device)
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        vectors = [p for p in self.model.parameters() if p.dim() != 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            eps=1e-9,
            fused=device.type == "cuda",
        )
        self.loss = torch.compile(self.model) if config.compile else self.model
        self.step = 0
        self.spec = ShardSpec(
            self.tokenizer_path,
            f"train/{config.seed}",
            config.shard_rows,
            config.shape.max_length + 1,
        )
        self.held_out = self._held_out_rows()

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint.pt"

    def load_weights(self, directory: Path) -> None:
        """Begin with an exported model instead of random weights."""
        tensors = load_file(directory / "model.safetensors")
        self.model.load_state_dict(
            {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        )

    def resume(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def save(self) -> None:
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)  # never half a checkpoint

    def _held_out_rows(self) -> dict[str, NDArray[np.uint16]]:
        spec = replace(
            self.spec, seed="held out", num_rows=self.config.held_out_rows, held_out=True
        )
        return {
            skill: make_shard(replace(spec, skill=skill), 0)
            for skill in SKILLS
            if skill != "small talk"
        }

    def _forward(self, rows: NDArray[np.uint16], answers_only: bool = False) -> Tensor:
        tokens, targets, weights = _tensors(rows, self.device)
        if answers_only:
            weights = (weights == weights.max()).float()
        # Flash attention where it can run: its backward pass can be deterministic.
        kernels = (
            [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
            if self.device.type == "cuda"
            else [SDPBackend.MATH]
        )
        with torch.autocast(self.device.type, dtype=torch.bfloat16), sdpa_kernel(kernels):
            loss: Tensor = self.loss(tokens, targets, weights)
        return loss

    def evaluate(self) -> dict[str, float]:
        """Held-out loss of each skill: nats per token of a story, a translation, an answer."""
        losses = {}
        with torch.no_grad():
            for skill, rows in self.held_out.items():
                parts = [
                    rows[i : i + self.config.batch_rows]
                    for i in range(0, len(rows), self.config.batch_rows)
                ]
                losses[skill] = sum(
                    self._forward(part, answers_only=True).item() for part in parts
                ) / len(parts)
        return losses

    def train(self, until: int | None = None) -> None:
        config, last = self.config, until or self.config.steps
        started, first = time.perf_counter(), self.step
        for rows in _batches(config, self.spec, self.step):
            if self.step >= last:
                break
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(config, self.step)
            loss = self._forward(rows)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            if self.step % 100 == 0 or self.step == last:
                seconds = time.perf_counter() - started
                rate = (self.step - first) * config.batch_rows * config.shape.max_length / seconds
                print(
                    f"step {self.step:6d}  loss {loss.item():.6f}  {rate / 1e6:.2f} M tokens/s"
                    f"  {seconds:.0f} s",
                    flush=True,
                )
            if self.step % config.evaluate_every == 0 or self.step == last:
                print(
                    "held-out "
                    + "  ".join(f"{skill} {loss:.4f}" for skill, loss in self.evaluate().items()),
                    flush=True,
                )
            if self.step % config.checkpoint_every == 0 and self.step < last:
                self.save()
        self.save()

    def export(self, directory: Path) -> None:
        export(self.model, Tokenizer.from_file(str(self.tokenizer_path)), directory)


def be_deterministic() -> None:
    """Ask PyTorch for the same bits on every run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--directory", type=Path, required=True, help="where tokenizer, checkpoint and model go"
    )
    parser.add_argument("--steps", type=int, default=TrainConfig.steps)
    parser.add_argument("--learning-rate", type=float, default=TrainConfig.learning_rate)
    parser.add_argument("--batch-rows", type=int, default=TrainConfig.batch_rows)
    parser.add_argument("--seed", type=int, default=TrainConfig.seed)
    parser.add_argument(
        "--workers",
        type=int,
        default=TrainConfig.num_workers,
        help="processes that write the corpus",
    )
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument(
        "--start-from",
        type=Path,
        default=None,
        help="begin with this exported model's weights and tokenizer",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="the same bits on every run of one kind of GPU; slower",
    )
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if arguments.deterministic:
        be_deterministic()
    try:
        config = TrainConfig(
            steps=arguments.steps,
            batch_rows=arguments.batch_rows,
            learning_rate=arguments.learning_rate,
            seed=arguments.seed,
            num_workers=arguments.workers,
            compile=not arguments.no_compile,
        )
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(asdict(config)), flush=True)
    started = time.perf_counter()
    if arguments.start_from:
        arguments.directory.mkdir(parents=True, exist_ok=True)
        shutil.copy(arguments.start_from / "tokenizer.json", arguments.directory)
    trainer = Trainer(
        config, arguments.directory, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )
    num_parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"{num_parameters:,} parameters, ready in {time.perf_counter() - started:.0f} s")
    if arguments.start_from:
        trainer.load_weights(arguments.start_from)
    if trainer.checkpoint.exists():
        trainer.resume()
        print(f"resumed at step {trainer.step}")
    trainer.train()
    trainer.export(arguments.directory / "model")
    print(f"done in {time.perf_counter() - started:.0f} s: {arguments.directory / 'model'}")


if __name__ == "__main__":
    main()
