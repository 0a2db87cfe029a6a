"""Whether two runs may rightly differ: the gap between the two best logits at the place where they part."""

from collections.abc import Sequence

import torch

from common.engine.build import BuiltEngine
from common.model.dense_attention import DenseAttention
from common.model.dense_recurrence import DenseRecurrence

NEAR_TIE = 1e-4


@torch.inference_mode()
def token_gap(built: BuiltEngine, known: Sequence[int]) -> float:
    """Gap of the trunk's two best logits for the token after ``known``."""
    ids = torch.tensor([list(known)])
    dense = DenseAttention(built.trunk.config.layer_windows)
    hidden = built.trunk(ids, torch.arange(len(known))[None], dense, DenseRecurrence())
    return _gap(built.trunk.logits(hidden[0, -1]))


@torch.inference_mode()
def draft_gap(built: BuiltEngine, known: Sequence[int], drafts: Sequence[int], m: int) -> float:
    """Gap of module m's two best logits after ``known`` and the first m of ``drafts``."""
    assert built.modules is not None
    ids = torch.tensor([[*known, *drafts[:m]]])
    length = len(known)
    positions = torch.arange(length)[None]
    dense = DenseAttention((*built.trunk.config.layer_windows, *built.modules.config.windows))
    hidden = built.trunk(ids[:, :length], positions, dense, DenseRecurrence())
    # Module i at p reads token p+i+1; its last row is T-1, where it reads draft i (module 0: token T).
    hidden, positions = hidden[:, : length - 1], positions[:, : length - 1]
    for i in range(m + 1):
        hidden = built.modules.forward_module(i, hidden, ids[:, i + 1 : length + i], positions, dense)
    return _gap(built.modules.draft_logits(m, hidden[0, -1]))


def _gap(logits: torch.Tensor) -> float:
    best = logits.float().topk(2).values
    return float(best[0] - best[1])
