"""Records what a frozen trunk computes over token sequences: the training data of its MTP modules.

    python -m scripts.train_features TRUNK RESPONSES.jsonl OUT [--hold-out topics|every]

reads {"prompt": ids, "response": ids, "temperature": t} lines and writes shards of (ids, hidden states of the
last block before the final norm, bf16). Held-out sequences go to shards of their own: with `topics` all
prompts about one topic in ten (the responses of SmolLM2, whose prompts are templates x topics), with `every`
one line in forty. An interrupted run continues with the first shard that is missing.
"""

import argparse
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from common.model.dense_attention import DenseAttention
from common.model.transformer import Transformer
from common.model.weights import load_transformer

SHARD = 48  # sequences
TEMPLATES = [
    r"Write a short paragraph about (.+)\.",
    r"Write a short story involving (.+)\.",
    r"List five questions a beginner might ask about (.+)\.",
    r"How would you explain (.+) to a child\?",
    r"Write a poem about (.+)\.",
    r"Write a Python program related to (.+)\.",
    r"Give me three tips about (.+)\.",
    r"Describe the history of (.+) in a few sentences\.",
    r"Tell me an interesting fact about (.+)\.",
    r"What are the advantages and disadvantages of (.+)\?",
    r"Write a friendly email that mentions (.+)\.",
    r"What are common mistakes people make with (.+)\?",
    r"Summarize the main ideas behind (.+)\.",
    r"Give me a step-by-step guide to (.+)\.",
    r"What is (.+)\?",
    r"Why is (.+) important\?",
    r"Explain (.+) in simple terms\.",
    r"Compare (.+) with something similar\.",
]


@dataclass(frozen=True)
class Recorded:
    """One sequence: ids int32 [n], hidden bf16 [n, D]; the first `prompt_length` ids were given."""

    ids: Tensor
    hidden: Tensor
    prompt_length: int
    temperature: float


def topic_of(question: str) -> str:
    """What a templated question is about; ValueError for a question of no known template."""
    for template in TEMPLATES:
        match = re.fullmatch(template, question)
        if match:
            return match[1]
    raise ValueError(f"question {question!r} is of no known template")


def question_of(tokenizer: Tokenizer, prompt: list[int]) -> str:
    """The user's turn of a ChatML prompt."""
    text: str = tokenizer.decode(prompt, skip_special_tokens=False)
    return text.split("user\n")[1].split("<|im_end|>")[0]


def held_out_topics(topics: list[str], seed: int = 0) -> set[str]:
    """One topic in ten, the same for the same topics."""
    names = sorted(set(topics))
    random.Random(seed).shuffle(names)
    return set(names[: len(names) // 10])


@torch.no_grad()
def record(trunk: Transformer, sequences: list[list[int]], batch: int = 8) -> list[Tensor]:
    """Hidden states [n, D] in bf16 of each sequence; sequences of similar length share a batch."""
    attend = DenseAttention(trunk.config.layer_windows)
    out: list[Tensor] = [torch.empty(0)] * len(sequences)
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    for at in range(0, len(order), batch):
        rows = order[at : at + batch]
        longest = max(len(sequences[i]) for i in rows)
        ids = torch.tensor([sequences[i] + [0] * (longest - len(sequences[i])) for i in rows])
        hidden = trunk(ids, torch.arange(longest), attend)
        for row, i in enumerate(rows):
            out[i] = hidden[row, : len(sequences[i])].to(torch.bfloat16).clone()
    return out


def load_shards(folder: Path, kind: str) -> list[Recorded]:
    """All sequences of the `kind` ("train" or "held") shards present so far."""
    records: list[Recorded] = []
    for path in sorted(folder.glob(f"{kind}_*.pt")):
        s = torch.load(path)
        for ids, hidden, n, t in zip(
            s["ids"], s["hidden"], s["prompt_length"], s["temperature"], strict=True
        ):
            records.append(Recorded(ids, hidden, n, t))
    if not records:
        raise FileNotFoundError(f"no {kind}_*.pt in {folder}: run scripts.train_features first")
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trunk", type=Path)
    parser.add_argument("responses", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hold-out", choices=["topics", "every"], default="every")
    parser.add_argument(
        "--temperatures", type=float, nargs="*", help="take only lines of these, in this order"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    trunk = load_transformer(args.trunk, "float32")
    with args.responses.open() as file:
        lines = [json.loads(line) for line in file]
    if args.hold_out == "topics":
        tokenizer = Tokenizer.from_file(str(args.trunk / "tokenizer.json"))
        topics = [topic_of(question_of(tokenizer, line["prompt"])) for line in lines]
        chosen = held_out_topics(topics, args.seed)
        held = [topic in chosen for topic in topics]
    else:
        held = [i % 40 == 0 for i in range(len(lines))]
    order = list(range(len(lines)))
    random.Random(args.seed).shuffle(order)
    wanted = args.temperatures or sorted({line["temperature"] for line in lines})
    order = [i for t in wanted for i in order if lines[i]["temperature"] == t]
    for kind, flag in (("held", True), ("train", False)):
        mine = [i for i in order if held[i] is flag]
        for number in tqdm(range(-(-len(mine) // SHARD)), desc=f"{kind} shards", mininterval=10):
            path = args.out / f"{kind}_{number:04d}.pt"
            if path.is_file():
                continue
            taken = [lines[i] for i in mine[number * SHARD : (number + 1) * SHARD]]
            sequences = [line["prompt"] + line["response"] for line in taken]
            shard = {
                "ids": [torch.tensor(s, dtype=torch.int32) for s in sequences],
                "hidden": record(trunk, sequences),
                "prompt_length": [len(line["prompt"]) for line in taken],
                "temperature": [float(line["temperature"]) for line in taken],
            }
            torch.save(shard, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)


if __name__ == "__main__":
    main()
