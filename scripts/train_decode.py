"""Plain batched generation with a trunk, for training data and measurements: rows of one length, no paging.

    python -m scripts.train_decode TRUNK TOKENS.bin OUT.jsonl --rows 4096

writes the trunk's own continuations of random pieces of a token file, in the format `train_features` reads:
{"prompt": ids, "response": ids, "temperature": t} a line.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from common.model.transformer import Transformer
from common.model.weights import load_transformer

TEMPERATURES = (0.0, 0.6, 0.0, 0.8)  # in turn; greedy text twice


class CachedAttention:
    """Attention of the newest tokens over all before them; keys and values stay in one tensor a layer."""

    def __init__(self, trunk: Transformer, rows: int, capacity: int) -> None:
        config, dtype = trunk.config, trunk.embedding.dtype
        shape = (2, rows, config.num_kv_heads, capacity, config.head_dim)
        self.windows = config.layer_windows
        self.kv = [torch.empty(shape, dtype=dtype) for _ in range(config.num_layers)]
        self.length = 0  # positions held; the caller advances it after each forward

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, T, H, Dh], k and v [B, T, KV, Dh] at positions length..length+T-1 -> [B, T, H, Dh]."""
        new, window = q.shape[1], self.windows[layer]
        end = self.length + new
        self.kv[layer][0, :, :, self.length : end] = k.transpose(1, 2)
        self.kv[layer][1, :, :, self.length : end] = v.transpose(1, 2)
        begin = 0 if window is None else max(0, self.length + 1 - window)
        keys, values = self.kv[layer][:, :, :, begin:end]
        if new == 1:  # the query heads of one key head are its rows: nothing is repeated
            grouped = q.view(q.shape[0], keys.shape[1], -1, q.shape[-1])
            return F.scaled_dot_product_attention(grouped, keys, values).view_as(q)
        distance = torch.arange(self.length, end)[:, None] - torch.arange(begin, end)[None, :]
        mask = (distance >= 0) & (distance < (window or end))
        groups = q.shape[2] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask).transpose(1, 2)


@torch.no_grad()
def generate(
    trunk: Transformer, prompts: Tensor, new_tokens: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """prompts int64 [B, L] -> ids [B, L + new_tokens]; temperature 0 takes the most likely token."""
    rows, length = prompts.shape
    attend = CachedAttention(trunk, rows, length + new_tokens)
    ids, fresh = prompts, prompts
    for _ in range(new_tokens):
        hidden = trunk(fresh, torch.arange(attend.length, ids.shape[1]), attend)
        attend.length = ids.shape[1]
        logits = trunk.logits(hidden[:, -1])
        if temperature == 0:
            fresh = logits.argmax(-1, keepdim=True)
        else:
            fresh = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        ids = torch.cat((ids, fresh), 1)
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trunk", type=Path)
    parser.add_argument("tokens", type=Path, help="uint16 token file that `train_corpus` wrote")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    trunk = load_transformer(args.trunk, "float32")
    stream = torch.from_numpy(np.fromfile(args.tokens, dtype=np.uint16).astype(np.int64))
    generator = torch.Generator().manual_seed(args.seed)
    with args.out.open("w") as file:
        for batch in tqdm(
            range(-(-args.rows // args.batch)), desc="continuations", unit="batch", mininterval=10
        ):
            starts = torch.randint(len(stream) - args.prompt_tokens, (args.batch,), generator=generator)
            prompts = torch.stack([stream[s : s + args.prompt_tokens] for s in starts])
            temperature = TEMPERATURES[batch % len(TEMPERATURES)]
            rows = generate(trunk, prompts, args.new_tokens, temperature, generator).tolist()
            for row in rows:
                prompt, response = row[: args.prompt_tokens], row[args.prompt_tokens :]
                file.write(
                    json.dumps({"prompt": prompt, "response": response, "temperature": temperature}) + "\n"
                )


if __name__ == "__main__":
    main()
