"""One uninterrupted pass over what a request knows: would it have said, and drafted, the same?

A difference where the two best scores lie closer than `NEAR_TIE` is a near-tie: reported, not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cli.near_ties import NEAR_TIE
from cli.schedules.random_models import Weights
from common.engine.counter_rng import Purpose, gumbel, request_key
from common.engine.sampler import process_logits
from common.model.dense_attention import DenseAttention
from common.model.dense_recurrence import DenseRecurrence
from common.model.transformer import Transformer
from common.request import Request


@dataclass(frozen=True)
class Differences:
    """Places where the pass says otherwise."""

    wrong: tuple[int, ...] = ()
    near_ties: int = 0


@torch.inference_mode()
def token_differences(trunk: Transformer, request: Request) -> Differences:
    """Positions of output tokens that one dense pass does not give: greedy, or seeded (noise included)."""
    count, sampling = request.num_output_tokens, request.sampling
    if count == 0 or (not sampling.greedy and sampling.seed is None):
        return Differences()
    tokens, first = request.token_ids, request.num_prompt_tokens
    dense = DenseAttention(trunk.config.layer_windows)
    hidden = trunk(torch.tensor([tokens[:-1]]), torch.arange(len(tokens) - 1)[None], dense, DenseRecurrence())
    outputs = tokens[first:]
    rows = trunk.logits(hidden[0, first - 1 :])
    scores = process_logits(rows, sampling, tokens[:first], first, outputs[:-1], ())
    if not sampling.greedy:
        key = request_key(request.request_id, sampling.seed)
        noise = [gumbel(key, first + i, Purpose.SAMPLE, rows.shape[-1]) for i in range(count)]
        scores = scores + torch.stack(noise)
    return _differences(scores, outputs, first)


@torch.inference_mode()
def draft_differences(weights: Weights, known: Sequence[int], drafts: Sequence[int]) -> Differences:
    """Indices of greedy drafts that the modules would not propose after ``known`` in one dense pass."""
    modules, trunk = weights.modules, weights.trunk
    rows = len(known) - 1  # module m at p reads token p+m+1; its last row is T-1
    if modules is None or rows < 1 or not drafts:
        return Differences()
    ids = torch.tensor([[*known, *drafts]])
    positions = torch.arange(rows)[None]
    dense = DenseAttention((*trunk.config.layer_windows, *modules.config.windows))
    hidden = trunk(ids[:, :rows], positions, dense, DenseRecurrence())
    scores = []
    for m in range(len(drafts)):
        hidden = modules.forward_module(m, hidden, ids[:, m + 1 : rows + m + 1], positions, dense)
        scores.append(modules.draft_logits(m, hidden[0, -1]))
    vocab = modules.draft_vocab
    columns = drafts if vocab is None else [int((vocab == draft).nonzero()[0]) for draft in drafts]
    return _differences(torch.stack(scores), columns, 0)


def _differences(scores: torch.Tensor, chosen: Sequence[int], first: int) -> Differences:
    """scores [n, V] and the n tokens chosen by them; ``first`` is the number of the first."""
    gaps = (scores.max(-1).values - scores.gather(1, torch.tensor(chosen)[:, None])[:, 0]).tolist()
    wrong = tuple(first + i for i, gap in enumerate(gaps) if gap >= NEAR_TIE)
    return Differences(wrong, sum(0 < gap < NEAR_TIE for gap in gaps))
