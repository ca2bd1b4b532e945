"""Loads a model directory into a model that is ready to run.

Tensors are read from memory-mapped safetensors files straight into the parameters, so the model
is in memory once. Every parameter must be loaded and every tensor must be used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from octavo.config import LoadFormat
from octavo.errors import ModelError, shown
from octavo.json_fields import read_json
from octavo.layers.base import WeightOwner, WeightTargets
from octavo.layers.linear import LinearMethod
from octavo.layers.norm import Norm
from octavo.models.base import CausalLM
from octavo.models.config import ModelConfig
from octavo.models.registry import FAMILIES

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
DUMMY_STD = 0.02
# Dummy weights repeat one array of noise; its prime length makes the rows of a matrix differ.
NOISE_LENGTH = 1_000_003


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    seed: int = 0,
) -> CausalLM:
    """Load a model with its weights, cast to `dtype`, on `device`; ModelError if they do not fit.

    With load_format "dummy" the weights are random, from `seed`, and no file is read.
    """
    model = build_model(config, dtype, device)
    if load_format == "dummy":
        fill_with_noise(model, seed)
    else:
        load_weights(model, config)
    for module in model.modules():
        if isinstance(module, WeightOwner):
            module.finalize()
    return model


def build_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """The model with uninitialised weights, before any `finalize`."""
    module_name, _, class_name = FAMILIES[config.family].model_class.partition(":")
    model_class = getattr(import_module(module_name), class_name)
    with torch.device("meta"):  # shapes only, until dtype and device are set
        model: CausalLM = model_class(config, device)
    # Not Module.to_empty: copying from "meta" imports sympy, which takes a second.
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            weight = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(weight, requires_grad=False))
    if config.tied_embeddings:
        model.head.tie(model.embedding)
    return model


def load_weights(model: CausalLM, config: ModelConfig) -> None:
    """Copy the tensors of config.directory into the parameters.

    Raises ModelError that names the tensor and the file: missing, unknown, wrong shape or dtype,
    two different values for one parameter, unreadable file.
    """
    names = FAMILIES[config.family].weights
    targets = weight_targets(model, config)
    loaded: set[int] = set()  # ids of targets; tied weights have two names
    unknown: list[str] = []
    for path, name, tensor in _read_tensors(config.directory):
        key = _without_prefix(name, names.prefixes)
        target = targets.get(key)
        if target is not None:
            where = f"{path}: {name}"
            _check(tensor, target, where)
            if id(target) not in loaded:
                target.copy_(tensor)
            elif not tensor.to(target).allclose(target, rtol=0, atol=0, equal_nan=True):
                raise ModelError(f"{where} {_contradiction(target is model.embedding.weight)}")
            loaded.add(id(target))
        elif not any(re.fullmatch(pattern, key) for pattern in names.ignored):
            unknown.append(f"{name} ({path.name})")
    if unknown:
        raise ModelError(
            f"{config.directory}: tensors that {config.family} does not have: {_few(unknown)}"
        )
    missing = [name for name, target in targets.items() if id(target) not in loaded]
    if missing:
        raise ModelError(f"{config.directory}: the weights lack {_few(missing)}")


def weight_targets(model: CausalLM, config: ModelConfig) -> WeightTargets:
    """Where the checkpoint's tensors go, by their names without prefix."""
    names = FAMILIES[config.family].weights
    targets: WeightTargets = {}
    for path, module in model.named_modules():
        if not isinstance(module, WeightOwner):
            continue
        own = module.targets(names.of(path))
        if names.transposed and path.startswith("layers.") and isinstance(module, LinearMethod):
            own = {name: target.t() for name, target in own.items()}
        targets |= own
    return targets


def fill_with_noise(model: CausalLM, seed: int) -> None:
    """Random weights: norms are 1, everything else is normal with a small deviation."""
    first = next(model.parameters())
    generator = torch.Generator(first.device).manual_seed(seed)
    noise = torch.randn(NOISE_LENGTH, generator=generator, device=first.device)
    noise = (noise * DUMMY_STD).to(first.dtype)
    position = 0
    for parameter in model.parameters():
        flat, done = parameter.view(-1), 0
        while done < flat.numel():
            part = noise[position : position + flat.numel() - done]
            flat[done : done + part.numel()].copy_(part)
            done += part.numel()
            position = (position + part.numel()) % NOISE_LENGTH
    for module in model.modules():
        if isinstance(module, Norm) and module.weight is not None:
            module.weight.fill_(1.0 - module.config.offset)


def _without_prefix(name: str, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _check(tensor: Tensor, target: Tensor, where: str) -> None:
    if tensor.shape != target.shape:
        raise ModelError(
            f"{where} has shape {list(tensor.shape)}; config.json asks for {list(target.shape)}"
        )
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ModelError(f"{where} is {tensor.dtype}: quantised weights are not served")


def _contradiction(is_embedding: bool) -> str:
    """The error for a tensor whose parameter another tensor has set to different values."""
    if is_embedding:
        return (
            "differs from the token embeddings, but config.json says that they are the same "
            "(tie_word_embeddings)"
        )
    return "differs from another tensor for the same parameter"


def _read_tensors(directory: Path) -> Iterator[tuple[Path, str, Tensor]]:
    """(file, name, memory-mapped tensor) of every tensor in the weight files."""
    for path, expected in _weight_files(directory).items():
        try:
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                lacking = sorted(expected - names)
                if lacking:
                    raise ModelError(f"{path} lacks {_few(lacking)}, which {INDEX_FILE} lists")
                for name in sorted(names):
                    yield path, name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is truncated or not a safetensors file: {error}") from error


def _weight_files(directory: Path) -> dict[Path, set[str]]:
    """The weight files, each with the tensors that the index (if there is one) expects in it."""
    if (directory / SINGLE_FILE).is_file():
        return {directory / SINGLE_FILE: set()}
    if not (directory / INDEX_FILE).is_file():
        raise ModelError(_no_weights(directory))
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(f"{directory / INDEX_FILE}: weight_map does not map tensors to files")
    files: dict[Path, set[str]] = {}
    for name, file_name in weight_map.items():
        # Only the file name is used, so that an index cannot point outside the directory.
        files.setdefault(directory / Path(file_name).name, set()).add(name)
    present = {path.name for path in directory.iterdir() if path.is_file()}
    absent = [path.name for path in files if path.name not in present]
    if absent:
        raise ModelError(f"{directory}: {INDEX_FILE} lists {_few(absent)}, which does not exist")
    return files


def _no_weights(directory: Path) -> str:
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        return (
            f"{directory} holds its weights as pickle ({_few(pickles)}), which can run any code "
            f"when it is read; convert it to {SINGLE_FILE}"
        )
    return f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there"


def _few(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(shown(name)[1:-1] for name in names[:3]) + more
