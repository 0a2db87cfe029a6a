"""Lets a trunk answer templated questions about new topics, and records its hidden states on the way.

    python -m scripts.train_answers TRUNK TOPICS.txt OUT --first-shard 1000

More on-policy text is what MTP modules need most: with a few hundred thousand tokens they learn the
text by heart.
Each topic (one a line) meets a few of the templates of `train_features`; answers are greedy, in batches of
prompts of one length, and end at <|im_end|>. Shards are what `train_modules` reads, ready as they come.
"""

import argparse
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from common.model.transformer import Transformer
from common.model.weights import load_transformer
from scripts.train_decode import CachedAttention
from scripts.train_features import TEMPLATES

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def prompt_of(question: str) -> str:
    """The ChatML text before the answer."""
    turns = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    return turns + "<|im_start|>assistant\n"


def questions(topics: list[str], per_topic: int, seed: int) -> list[str]:
    """Each topic in `per_topic` different templates, shuffled."""
    rng = random.Random(seed)
    forms = [template.replace("(.+)", "{}").replace("\\", "") for template in TEMPLATES]
    out = [form.format(topic) for topic in topics for form in rng.sample(forms, per_topic)]
    rng.shuffle(out)
    return out


@torch.no_grad()
def answer(trunk: Transformer, prompts: Tensor, new_tokens: int, eos: int) -> list[tuple[Tensor, Tensor]]:
    """Greedy answers to prompts [B, L]: (ids [n], hidden bf16 [n, D]) a row, of all its ids.

    Finished rows leave the batch when they are a quarter of it.
    """
    rows, length = prompts.shape
    attend = CachedAttention(trunk, rows, length + new_tokens)
    ids = torch.empty(rows, length + new_tokens, dtype=torch.int32)
    hidden = torch.empty(rows, length + new_tokens, trunk.config.hidden_size, dtype=torch.bfloat16)
    ends = [length + new_tokens] * rows
    active, fresh = torch.arange(rows), prompts  # row numbers still being generated, their newest ids
    while len(active):
        begin, end = attend.length, attend.length + fresh.shape[1]
        state = trunk(fresh, torch.arange(begin, end), attend)
        attend.length = end
        ids[active, begin:end] = fresh.int()
        hidden[active, begin:end] = state.bfloat16()
        for row, last in zip(active.tolist(), fresh[:, -1].tolist(), strict=True):
            if last == eos and begin > 0:
                ends[row] = min(ends[row], end)
        if end == length + new_tokens:
            break
        going = torch.tensor([ends[row] > end for row in active.tolist()])
        if going.sum() <= 0.75 * len(active):
            attend.kv = [kv[:, going].contiguous() for kv in attend.kv]
            active, state = active[going], state[going]
        fresh = trunk.logits(state[:, -1]).argmax(-1, keepdim=True)
    return [(ids[row, :end].clone(), hidden[row, :end].clone()) for row, end in enumerate(ends)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trunk", type=Path)
    parser.add_argument("topics", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--per-topic", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--first-shard", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    trunk = load_transformer(args.trunk, "float32")
    tokenizer = Tokenizer.from_file(str(args.trunk / "tokenizer.json"))
    topics = [line.strip() for line in args.topics.read_text().splitlines() if line.strip()]
    by_length: dict[int, list[list[int]]] = {}
    for question in questions(topics, args.per_topic, args.seed):
        ids = tokenizer.encode(prompt_of(question), add_special_tokens=False).ids
        by_length.setdefault(len(ids), []).append(ids)
    groups = [p[at : at + args.batch] for p in by_length.values() for at in range(0, len(p), args.batch)]
    groups = sorted(groups, key=len, reverse=True)  # full batches first: they are the cheapest per token
    for number, group in enumerate(tqdm(groups, desc="answers", unit="batch", mininterval=10)):
        path = args.out / f"train_{args.first_shard + number:04d}.pt"
        if path.is_file():
            continue
        rows = answer(trunk, torch.tensor(group), args.new_tokens, trunk.config.eos_token_ids[0])
        shard = {
            "ids": [ids for ids, _ in rows],
            "hidden": [hidden for _, hidden in rows],
            "prompt_length": [len(prompt) for prompt in group],
            "temperature": [0.0] * len(rows),
        }
        torch.save(shard, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)


if __name__ == "__main__":
    main()
