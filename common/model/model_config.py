"""config.json of a checkpoint -> ModelConfig: everything the decoder needs to know, and nothing else.

Three families are understood in the usual Hugging Face layout: Llama, Qwen2 and Qwen3. A fourth is our own,
hybrids of attention (any windows) and recurrent layers. Whatever would change the arithmetic and is not
implemented (an activation, a rotary variant, quantised weights) is refused by name here, so that no model
ever runs slightly wrong. No torch: the router and the command line
read configurations too.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from common.errors import ModelLoadError
from common.kv_cache.state_group import RecurrentLayer
from common.model.rope_config import RopeConfig, read_rope, rope_scaling_json

__all__ = ["ARCHITECTURES", "ModelConfig", "RecurrentConfig", "RopeConfig", "read_json"]

Family = Literal["llama", "qwen2", "qwen3", "baton_hybrid"]

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "BatonHybridForCausalLM": "baton_hybrid",
}
ATTENTION_TYPES = ("full_attention", "sliding_attention")
RECURRENT_TYPES = ("short_conv", "gated_delta_net")
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class RecurrentConfig:
    """Geometry of recurrent layers. The convolution of a `short_conv` layer runs over the hidden size, that
    of a `gated_delta_net` layer over its q, k and v."""

    conv_kernel: int
    delta_heads: int
    delta_key_dim: int
    delta_value_dim: int

    @property
    def delta_channels(self) -> int:
        """q, k and v of all heads."""
        return self.delta_heads * (2 * self.delta_key_dim + self.delta_value_dim)

    def state_of(self, layer: int, kind: str, hidden_size: int) -> RecurrentLayer:
        """What a layer of that kind keeps between positions."""
        if kind == "short_conv":
            return RecurrentLayer(layer, (hidden_size, self.conv_kernel - 1))
        matrices = (self.delta_heads, self.delta_key_dim, self.delta_value_dim)
        return RecurrentLayer(layer, (self.delta_channels, self.conv_kernel - 1), matrices)


@dataclass(frozen=True)
class ModelConfig:
    """Geometry and arithmetic of a decoder-only checkpoint."""

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each query and key head before rotation
    tie_word_embeddings: bool
    layer_windows: tuple[int | None, ...]  # a layer sees positions > p - window; None = all
    max_position_embeddings: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # config.json and generation_config.json together
    dtype: str = "float32"  # what the checkpoint stores
    layer_types: tuple[str, ...] = ()  # one a layer; () = attention only, windowed as layer_windows says
    recurrent: RecurrentConfig | None = None  # present iff some layer is recurrent

    def __post_init__(self) -> None:
        if not self.layer_types:
            kinds = ("full_attention" if w is None else "sliding_attention" for w in self.layer_windows)
            object.__setattr__(self, "layer_types", tuple(kinds))

    @property
    def attention_windows(self) -> dict[int, int | None]:
        """{layer: window} of the attention layers."""
        return {
            i: self.layer_windows[i] for i, kind in enumerate(self.layer_types) if kind in ATTENTION_TYPES
        }

    @property
    def recurrent_layers(self) -> tuple[RecurrentLayer, ...]:
        """The states that recurrent layers keep."""
        layers = []
        for i, kind in enumerate(self.layer_types):
            if kind in RECURRENT_TYPES:
                assert self.recurrent is not None
                layers.append(self.recurrent.state_of(i, kind, self.hidden_size))
        return tuple(layers)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Reads config.json and, if present, generation_config.json. ModelLoadError if missing or not
        understood.
        """
        config = read_json(Path(folder) / "config.json")
        generation_path = Path(folder) / "generation_config.json"
        generation = read_json(generation_path) if generation_path.is_file() else None
        return cls.from_json(config, generation)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "ModelConfig":
        """The configuration in `raw` (config.json); ModelLoadError names what is missing or unsupported."""
        family = _family(raw)
        _refuse_unsupported(raw)
        num_layers = _positive(raw, "num_hidden_layers")
        hidden_size = _positive(raw, "hidden_size")
        num_heads = _positive(raw, "num_attention_heads")
        num_kv_heads = _positive(raw, "num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise ModelLoadError(
                f"config.json: num_attention_heads {num_heads} is not a multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
        head_dim = _head_dim(raw, family, hidden_size, num_heads)
        max_positions = _positive(
            raw, "max_position_embeddings", default=2048 if family == "llama" else 32768
        )
        attention_bias = bool(raw.get("attention_bias", False))
        return cls(
            family=family,
            vocab_size=_positive(raw, "vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=_positive(raw, "intermediate_size"),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=read_rope(raw, max_positions),
            qkv_bias=True if family == "qwen2" else attention_bias,
            o_bias=False if family == "qwen2" else attention_bias,
            mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
            qk_norm=family in ("qwen3", "baton_hybrid"),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            layer_windows=_layer_windows(raw, family, num_layers),
            max_position_embeddings=max_positions,
            bos_token_id=_first_id(raw.get("bos_token_id")),
            eos_token_ids=_eos_ids(raw, generation),
            dtype=_dtype(raw),
            layer_types=_hybrid_types(raw, num_layers) if family == "baton_hybrid" else (),
            recurrent=_recurrent(raw) if family == "baton_hybrid" else None,
        )

    def to_json(self) -> dict[str, Any]:
        """A config.json that `from_json`, and other engines, read back as this configuration."""
        architecture = next(name for name, family in ARCHITECTURES.items() if family == self.family)
        out: dict[str, Any] = {
            "architectures": [architecture],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope.theta,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": self.dtype,
            "use_cache": True,
        }
        if self.family != "qwen2":
            out["attention_bias"] = self.qkv_bias
        if self.family == "llama":
            out["mlp_bias"] = self.mlp_bias
        if self.rope.type != "default":
            out["rope_scaling"] = rope_scaling_json(self.rope)
        out.update(self._windows_json())
        if self.bos_token_id is not None:
            out["bos_token_id"] = self.bos_token_id
        if self.eos_token_ids:
            out["eos_token_id"] = (
                list(self.eos_token_ids) if len(self.eos_token_ids) > 1 else self.eos_token_ids[0]
            )
        return out

    def _windows_json(self) -> dict[str, Any]:
        if self.family == "baton_hybrid":
            sizes_json = {} if self.recurrent is None else asdict(self.recurrent)
            return {
                "layer_types": list(self.layer_types),
                "layer_windows": list(self.layer_windows),
                **sizes_json,
            }
        sizes = {window for window in self.layer_windows if window is not None}
        if not sizes:
            return {} if self.family == "llama" else {"use_sliding_window": False}
        if len(sizes) > 1 or self.family == "llama":
            raise ModelLoadError(
                f"a {self.family} config.json cannot say the layer windows {self.layer_windows}: "
                "use qwen2 or qwen3, and one window size"
            )
        return {
            "use_sliding_window": True,
            "sliding_window": sizes.pop(),
            "max_window_layers": 0,
            "layer_types": ["sliding_attention" if w else "full_attention" for w in self.layer_windows],
        }


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ModelLoadError if the file is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist: a model folder needs {path.name}") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def _family(raw: Mapping[str, Any]) -> Family:
    architectures = raw.get("architectures") or []
    for name in architectures:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    model_type = raw.get("model_type")
    if not architectures and model_type in ARCHITECTURES.values():
        return next(family for family in ARCHITECTURES.values() if family == model_type)
    named = architectures or model_type or "nothing"
    raise ModelLoadError(
        f"config.json: architectures names {named}; supported are {', '.join(ARCHITECTURES)}"
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelLoadError(f"config.json: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelLoadError(
            f"config.json: quantization_config ({method}) is not supported; use an unquantised checkpoint"
        )
    if raw.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise ModelLoadError(
            f"config.json: partial_rotary_factor {raw['partial_rotary_factor']} is not supported"
        )


def _positive(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelLoadError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelLoadError(f"config.json: {key} is {value!r}, expected a positive integer")
    return value


def _head_dim(raw: Mapping[str, Any], family: Family, hidden_size: int, num_heads: int) -> int:
    if raw.get("head_dim") is not None or family == "qwen3":
        head_dim = _positive(raw, "head_dim", default=128)
    elif hidden_size % num_heads:
        raise ModelLoadError(
            f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}"
        )
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ModelLoadError(f"config.json: head_dim {head_dim} is odd, rotary embedding needs pairs")
    return head_dim


def _layer_windows(raw: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    """`layer_types` if given, else Qwen's rule: layers from `max_window_layers` on slide when windows are in
    use.
    """
    if family == "baton_hybrid":
        return _hybrid_windows(raw, num_layers)
    layer_types = raw.get("layer_types")
    if family == "llama":
        if layer_types and any(kind != "full_attention" for kind in layer_types):
            raise ModelLoadError(
                "config.json: layer_types other than full_attention are not supported for llama"
            )
        return (None,) * num_layers
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    if layer_types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if window is not None and i >= first else None for i in range(num_layers))
    if len(layer_types) != num_layers:
        raise ModelLoadError(
            f"config.json: layer_types has {len(layer_types)} entries for {num_layers} layers"
        )
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelLoadError(f"config.json: layer_types {', '.join(map(str, unknown))} are not supported")
    if "sliding_attention" in layer_types and not window:
        raise ModelLoadError(
            "config.json: layer_types has sliding_attention, but use_sliding_window is false "
            "or sliding_window is missing"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _hybrid_types(raw: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """`layer_types` of our own family: required, one a layer."""
    kinds = raw.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelLoadError(
            f"config.json: layer_types is {kinds!r}, expected one entry for each of {num_layers} layers"
        )
    unknown = sorted({str(kind) for kind in kinds} - {*ATTENTION_TYPES, *RECURRENT_TYPES})
    if unknown:
        raise ModelLoadError(
            f"config.json: layer_types {', '.join(unknown)} are not supported; known are "
            f"{', '.join((*ATTENTION_TYPES, *RECURRENT_TYPES))}"
        )
    return tuple(kinds)


def _hybrid_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """`layer_windows` of our own family: a size for each sliding layer (they may differ), null for others."""
    kinds = _hybrid_types(raw, num_layers)
    windows = raw.get("layer_windows") or [None] * num_layers
    right = isinstance(windows, list) and len(windows) == num_layers
    right = right and all(
        isinstance(window, int) and window > 0 if kind == "sliding_attention" else window is None
        for kind, window in zip(kinds, windows, strict=True)
    )
    if not right:
        raise ModelLoadError(
            f"config.json: layer_windows is {windows!r}, expected a size for each sliding_attention layer of "
            f"{', '.join(kinds)} and null for the others"
        )
    return tuple(windows)


def _recurrent(raw: Mapping[str, Any]) -> RecurrentConfig | None:
    if not set(raw.get("layer_types", ())) & set(RECURRENT_TYPES):
        return None
    return RecurrentConfig(
        conv_kernel=_positive(raw, "conv_kernel"),
        delta_heads=_positive(raw, "delta_heads"),
        delta_key_dim=_positive(raw, "delta_key_dim"),
        delta_value_dim=_positive(raw, "delta_value_dim"),
    )


def _first_id(value: Any) -> int | None:
    ids = _ids(value)
    return ids[0] if ids else None


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
        raise ModelLoadError(f"config.json: token ids {value!r} are not integers")
    return list(values)


def _eos_ids(raw: Mapping[str, Any], generation: Mapping[str, Any] | None) -> tuple[int, ...]:
    """generation_config.json first, as generation ends on its ids; those of config.json are added."""
    ids = _ids((generation or {}).get("eos_token_id")) + _ids(raw.get("eos_token_id"))
    return tuple(dict.fromkeys(ids))


def _dtype(raw: Mapping[str, Any]) -> str:
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in _DTYPES:
        raise ModelLoadError(f"config.json: dtype {dtype!r} is not supported, only {', '.join(_DTYPES)}")
    return str(dtype)
