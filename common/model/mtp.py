"""The N multi-token-prediction modules that draft for a trunk.

Module m at position p reads the hidden state of module m-1 (the trunk for m = 0) at p and the embedding of
token p+m+1: RMSNorm(hidden) ++ RMSNorm(embedding) -> linear -> one decoder block of the trunk's kind, with
KV of its own (global layer n+m) -> norm -> head. Embedding and head are the trunk's; a draft vocabulary
may shrink the head.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from common.errors import ModelLoadError
from common.model.mtp_config import MtpConfig
from common.model.transformer import Attend, DecoderBlock, Transformer, replace_parameter
from kernels.linear import linear, pack_linear
from kernels.rms_norm import rms_norm

__all__ = ["MtpConfig", "MtpModule", "MtpModules"]


class MtpModule(nn.Module):
    """One module's own parameters; `MtpModules` runs it."""

    def __init__(self, trunk: Transformer, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        d = trunk.config.hidden_size
        self.hidden_norm = nn.Parameter(torch.ones(d, dtype=dtype))
        self.embed_norm = nn.Parameter(torch.ones(d, dtype=dtype))
        self.proj = nn.Parameter(torch.zeros(d, 2 * d, dtype=dtype))
        self.block = DecoderBlock(trunk.config, dtype)
        self.norm = nn.Parameter(torch.ones(d, dtype=dtype))

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """(name in model.safetensors, view of the parameter)."""
        yield prefix + "hidden_norm.weight", self.hidden_norm
        yield prefix + "embed_norm.weight", self.embed_norm
        yield prefix + "proj.weight", self.proj
        yield prefix + "norm.weight", self.norm
        yield from self.block.checkpoint_tensors(prefix + "block.")

    @torch.no_grad()
    def init_from_trunk(self, trunk: Transformer) -> None:
        """Starting point of training: the trunk's last attention block, its final norm, projection
        [I | 0.5 I]."""
        last = max(trunk.config.attention_windows, default=None)
        if last is None:
            raise ModelLoadError("MTP modules start from the trunk's last attention block; it has none")
        self.block.load_state_dict(trunk.blocks[last].state_dict())
        self.norm.copy_(trunk.final_norm)
        self.hidden_norm.copy_(trunk.final_norm)
        self.embed_norm.fill_(1.0)
        identity = torch.eye(self.proj.shape[0], dtype=self.proj.dtype, device=self.proj.device)
        self.proj.copy_(torch.cat((identity, 0.5 * identity), 1))


class MtpModules(nn.Module):
    """N modules over one trunk, which they read and never own (it is no submodule: not saved, not trained
    here).
    """

    draft_vocab: Tensor | None  # int64 [Vd]: draft index -> token id; None = the whole vocabulary

    def __init__(
        self,
        config: MtpConfig,
        trunk: Transformer,
        draft_vocab: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`draft_vocab` int64 [draft_vocab_size], required iff the configuration names a size."""
        super().__init__()
        _check_draft_vocab(config, draft_vocab, trunk.config.vocab_size)
        dtype = dtype or trunk.embedding.dtype
        self.config = config
        self._trunk = (trunk,)  # in a tuple, so that nn.Module does not register it
        self.modules_list = nn.ModuleList(MtpModule(trunk, dtype) for _ in range(config.num_modules))
        self.register_buffer("draft_vocab", draft_vocab, persistent=False)
        size = (config.draft_vocab_size or trunk.config.vocab_size, trunk.config.hidden_size)
        self.draft_head = nn.Parameter(torch.zeros(size, dtype=dtype)) if config.draft_head else None
        self._trunk_rows: Tensor | None = None
        self._packed_head: Tensor | None = None

    @property
    def trunk(self) -> Transformer:
        """The model these modules draft for."""
        return self._trunk[0]

    @property
    def num_modules(self) -> int:
        """N."""
        return self.config.num_modules

    def module(self, m: int) -> MtpModule:
        """Module m, 0 <= m < N."""
        module = self.modules_list[m]
        assert isinstance(module, MtpModule)
        return module

    def forward_module(
        self, m: int, hidden: Tensor, next_ids: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """hidden [*, D] of module m-1 (trunk for m = 0) at p, ids [*] of token p+m+1, positions p -> hidden
        [*, D].
        """
        module, trunk = self.module(m), self.trunk
        eps = trunk.config.rms_norm_eps
        embedded = trunk.embed(next_ids)
        both = torch.cat(
            (rms_norm(hidden, module.hidden_norm, eps), rms_norm(embedded, module.embed_norm, eps)), -1
        )
        x = linear(both, module.proj)
        cos, sin = trunk.rope.cos_sin(positions, x.dtype)
        out: Tensor = module.block(x, cos, sin, trunk.config.num_layers + m, attend)
        return out

    def draft_logits(self, m: int, hidden: Tensor) -> Tensor:
        """Module m's norm and the head: [*, D] -> [*, Vd], or [*, V] without a draft vocabulary."""
        normed = rms_norm(hidden, self.module(m).norm, self.trunk.config.rms_norm_eps)
        weight = self.draft_head_weight if self._packed_head is None else self._packed_head
        return linear(normed, weight)

    def draft_ids(self, indices: Tensor) -> Tensor:
        """Indices into the draft vocabulary [*] -> token ids [*]."""
        return indices if self.draft_vocab is None else self.draft_vocab[indices]

    @property
    def draft_head_weight(self) -> Tensor:
        """[Vd, D]: the modules' own head, or the trunk's rows (gathered once: the trunk is frozen for
        drafting).
        """
        if self.draft_head is not None:
            return self.draft_head
        if self.draft_vocab is None:
            return self.trunk.head_weight
        head = self.trunk.head_weight
        rows = self._trunk_rows
        if rows is None or rows.dtype != head.dtype or rows.device != head.device:
            rows = self._trunk_rows = head.detach()[self.draft_vocab].contiguous()
        return rows

    def pack(self) -> "MtpModules":
        """Packs all matrices for this CPU where that is faster (bf16): for inference only, never saved."""
        for m in range(self.num_modules):
            module = self.module(m)
            module.block.pack()
            replace_parameter(module, "proj", pack_linear(module.proj))
        self._packed_head = pack_linear(self.draft_head_weight)
        return self

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name in model.safetensors, view of the parameter), without `draft_vocab`."""
        for m in range(self.num_modules):
            yield from self.module(m).checkpoint_tensors(f"modules.{m}.")
        if self.draft_head is not None:
            yield "draft_head.weight", self.draft_head

    @torch.no_grad()
    def init_from_trunk(self) -> None:
        """Initialises every module from the trunk, and the own draft head (if any) from the trunk's rows."""
        for m in range(self.num_modules):
            self.module(m).init_from_trunk(self.trunk)
        if self.draft_head is not None:
            head = self.trunk.head_weight
            self.draft_head.copy_(head if self.draft_vocab is None else head[self.draft_vocab])


def _check_draft_vocab(config: MtpConfig, draft_vocab: Tensor | None, vocab_size: int) -> None:
    size = None if draft_vocab is None else draft_vocab.numel()
    if size != config.draft_vocab_size:
        raise ModelLoadError(
            f"MTP modules: draft_vocab has {size} ids, config.json says {config.draft_vocab_size}"
        )
    if draft_vocab is not None and (draft_vocab.min() < 0 or draft_vocab.max() >= vocab_size):
        raise ModelLoadError(
            f"MTP modules: draft_vocab has ids {int(draft_vocab.min())}..{int(draft_vocab.max())}, "
            f"the trunk's vocabulary is 0..{vocab_size - 1}"
        )
