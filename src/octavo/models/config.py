"""What a model is: its shapes, windows, rotary embedding and token ids, read from `config.json`.

Imports no torch, so that memory budgets and schedulers can be made without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from octavo.core.kv.specs import FullAttention, KVSpec, SlidingWindow
from octavo.errors import ConfigError, ModelError, shown

RotaryKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
NormKind = Literal["rms", "layer"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.json", "*.jinja"]
HUB_WEIGHTS = ["*.safetensors"]
# Files in subdirectories (other formats), and a second copy of the weights some repositories keep.
HUB_EXCLUDED = ["*/*", "consolidated*"]


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """How the frequencies of the rotary embedding follow from the position."""

    theta: float
    kind: RotaryKind = "default"
    factor: float = 1.0  # how many times the context was extended
    original_max_positions: int = 0  # llama3 and yarn: the context before the extension
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the bounds of the ramp to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cos and sin


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model's architecture in octavo's words, whatever names its family uses in config.json."""

    directory: Path
    architecture: str  # the class in config.json, such as "LlamaForCausalLM"
    family: str  # config.json's model_type
    vocab_size: int
    hidden_size: int
    embedding_size: int  # of a token's embedding; OPT-350m projects it to hidden_size
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_model_len: int  # tokens, prompt and output together
    # One entry a layer: the query at p reads keys p - window + 1 .. p; None: all keys up to p.
    # A window as long as the model's context is no window, and is kept as None.
    layer_windows: tuple[int | None, ...]
    attention_scales: tuple[float, ...]  # one a layer
    activation: str  # a name in octavo.layers.activation
    gated_mlp: bool
    norm: NormKind
    norm_eps: float
    norm_affine: bool = True  # norms have parameters
    norm_after: bool = False  # OPT-350m: a norm follows each block, on the residual itself
    final_norm: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    rotary: RotaryConfig | None = None  # None: learned positions
    num_learned_positions: int = 0  # rows of the table of learned positions
    learned_position_offset: int = 0  # its row for position 0
    tied_embeddings: bool = False
    dtype: str = "float32"  # of the weights in the files
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    # What generation_config.json sets (temperature, top_p, ...) for requests that do not.
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        assert len(self.layer_windows) == len(self.attention_scales) == self.num_layers
        windows = tuple(
            None if window is None or window >= self.max_model_len else window
            for window in self.layer_windows
        )
        object.__setattr__(self, "layer_windows", windows)

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` (and `generation_config.json`) in `path`; weights are not looked at.

        Raises ModelError for a missing or broken file, a family that octavo does not serve,
        quantised weights, and options in config.json that would change the result if octavo did
        not ignore them: those of the served families, and those of others that it knows of.
        """
        # Imported here because the readers make ModelConfigs.
        from octavo.models.families import read_model_config

        return read_model_config(Path(path))

    def with_max_model_len(self, max_model_len: int) -> ModelConfig:
        """The same model kept to shorter sequences; ConfigError beyond what it was made for."""
        if max_model_len > self.max_model_len:
            raise ConfigError(
                "max_model_len",
                f"{max_model_len} is more than the {self.max_model_len} positions of "
                f"{self.directory}",
            )
        return replace(self, max_model_len=max_model_len)

    def kv_specs(self) -> list[KVSpec]:
        """Which tokens' KV each layer keeps."""
        return [
            FullAttention() if window is None else SlidingWindow(window)
            for window in self.layer_windows
        ]

    def num_parameters(self) -> int:
        """Weights in the model, from the shapes alone; tied embeddings count once."""
        embeddings = self.vocab_size * self.embedding_size
        total = embeddings if self.tied_embeddings else 2 * embeddings
        total += self.num_learned_positions * self.hidden_size
        if self.embedding_size != self.hidden_size:  # projections in and out
            total += 2 * self.embedding_size * self.hidden_size
        total += self.num_layers * self._num_layer_parameters()
        if self.final_norm:
            total += self._num_norm_parameters(self.hidden_size)
        return total

    def weight_bytes(self, dtype_bytes: int) -> int:
        """What the weights take, and the rotary table, which is float32 whatever they are."""
        table = 0 if self.rotary is None else 4 * self.max_model_len * self.head_dim
        return self.num_parameters() * dtype_bytes + table

    def _num_norm_parameters(self, size: int) -> int:
        if not self.norm_affine:
            return 0
        return size if self.norm == "rms" else 2 * size

    def _num_layer_parameters(self) -> int:
        hidden, inner = self.hidden_size, self.intermediate_size
        query_size = self.num_heads * self.head_dim
        qkv_size = query_size + 2 * self.num_kv_heads * self.head_dim
        up_size = 2 * inner if self.gated_mlp else inner
        total = hidden * (qkv_size + query_size + up_size + inner)
        total += qkv_size if self.qkv_bias else 0
        total += hidden if self.output_bias else 0
        total += up_size + hidden if self.mlp_bias else 0
        total += 2 * self.head_dim if self.qk_norm else 0
        return total + 2 * self._num_norm_parameters(hidden)


def resolve_model(name: str, weights: bool = True) -> Path:
    """The directory of a model: "demo", a local directory, or a hub id that is fetched.

    Without `weights`, they are not fetched. Raises ModelError that says what was looked for.
    """
    if name == "demo":
        # The demo model's weights are unpacked only when somebody asks for them.
        from octavo.demo import demo_model_path

        return Path(demo_model_path())
    try:
        path = Path(name).expanduser()
        is_directory, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # too long a name, or an unknown user's home
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"no model {shown(name)}: {reason}") from error
    if is_directory:
        return path
    if exists:
        raise ModelError(f"{name} is a file; give the directory that holds config.json")
    if HUB_ID.fullmatch(name):
        return _fetch_from_hub(name, HUB_WEIGHTS + HUB_FILES if weights else HUB_FILES)
    raise ModelError(
        f"no model {name!r}: it is not a directory ({path.absolute()}), not 'demo', and not a hub "
        "id of the form organisation/name"
    )


def _fetch_from_hub(hub_id: str, patterns: list[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=HUB_EXCLUDED)
        )
    except Exception as error:  # its errors have no common base; all mean that there is no model
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"no model {hub_id!r}: there is no such directory, and it could not be fetched from "
            f"the hub ({reason[0] if reason else type(error).__name__})"
        ) from error
