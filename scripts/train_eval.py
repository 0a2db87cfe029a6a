"""Acceptance per draft position, measured as speculative decoding meets it: once a verification step.

    python -m scripts.train_eval TRUNK MODULES PROMPTS.json [--new-tokens 64] [--temperature 0] [--write]

PROMPTS.json holds {"prompts": [ids, ...]}. Greedy, drafts cannot change the text, so each continuation is
generated once, the modules run over it once (a draft after a wrong one counts for nothing, hence every
draft that counts was computed from right tokens) and the steps are walked. Sampled, the steps are really
taken: draft from q, accept with probability min(1, p/q), else draw from max(p - q, 0).
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from common.model.dense_attention import DenseAttention
from common.model.mtp import MtpModules
from common.model.weights import load_mtp, load_transformer, trunk_digest
from scripts.train_decode import generate
from scripts.train_features import Recorded


@dataclass(frozen=True)
class Acceptance:
    """Cumulative rates: `per_position[m]` is the share of steps whose first m+1 drafts were all accepted."""

    per_position: list[float]
    steps: int

    @property
    def length(self) -> float:
        """Tokens a step yields on average: 1 + accepted drafts."""
        return 1 + sum(self.per_position)


def attention_for(modules: MtpModules) -> DenseAttention:
    """Dense attention with the trunk's and the modules' windows."""
    return DenseAttention((*modules.trunk.config.layer_windows, *modules.config.windows))


@torch.no_grad()
def right_drafts(modules: MtpModules, ids: Tensor, hidden: Tensor, attend: DenseAttention) -> Tensor:
    """ids [n], trunk hidden [n, D] -> bool [N, n]: module m's draft at position p equals ids[p+m+2].

    Positions whose wanted token lies past the end are False.
    """
    count, n = modules.num_modules, len(ids)
    right = torch.zeros(count, n, dtype=torch.bool)
    state = hidden[None]
    for m in range(count):
        length = n - m - 1  # positions that have the token this module reads
        if length <= 1:
            break
        state = modules.forward_module(m, state[:, :length], ids[None, m + 1 :], torch.arange(length), attend)
        drafts = modules.draft_ids(modules.draft_logits(m, state[0]).argmax(-1))
        right[m, : length - 1] = drafts[:-1] == ids[m + 2 :]
    return right


def walk(right: Tensor, prompt_length: int, length: int) -> list[int]:
    """Drafts accepted at each step of a greedy decode of `length` ids, of which the first were the prompt.

    The first step drafts after the first new token is known; steps without room for all drafts are left out.
    """
    count, accepted = right.shape[0], []
    newest = prompt_length  # index of the newest known token T; modules draft from position T-1
    while newest + count < length:
        row = right[:, newest - 1].tolist()
        good = next((m for m in range(count) if not row[m]), count)
        accepted.append(good)
        newest += good + 1
    return accepted


def rates(accepted: list[int], count: int) -> list[float]:
    """Accepted drafts of each step -> cumulative rate of each of `count` positions."""
    return [sum(a > m for a in accepted) / max(1, len(accepted)) for m in range(count)]


def agreement(modules: MtpModules, records: list[Recorded]) -> list[float]:
    """Cumulative rates over recorded greedy sequences, whose own tokens are the trunk's choices."""
    attend, accepted = attention_for(modules), list[int]()
    for r in records:
        right = right_drafts(modules, r.ids.long(), r.hidden.float(), attend)
        accepted += walk(right, r.prompt_length, len(r.ids))
    return rates(accepted, modules.num_modules)


@torch.no_grad()
def greedy_acceptance(modules: MtpModules, prompts: list[list[int]], new_tokens: int) -> Acceptance:
    """Generates from each prompt and walks the steps."""
    trunk, attend, accepted = modules.trunk, attention_for(modules), list[int]()
    eos = set(trunk.config.eos_token_ids)
    for prompt in tqdm(prompts, desc="greedy", mininterval=10):
        ids = generate(trunk, torch.tensor([prompt]), new_tokens, 0.0, torch.Generator())[0]
        ends = [i for i in range(len(prompt), len(ids)) if int(ids[i]) in eos]
        ids = ids[: ends[0] + 1] if ends else ids
        hidden = trunk(ids[None], torch.arange(len(ids)), attend)[0]
        accepted += walk(right_drafts(modules, ids, hidden, attend), len(prompt), len(ids))
    return Acceptance(rates(accepted, modules.num_modules), len(accepted))


@torch.no_grad()
def propose(
    modules: MtpModules,
    ids: list[int],
    attend: DenseAttention,
    temperature: float,
    generator: torch.Generator,
) -> tuple[list[int], list[Tensor]]:
    """Drafts after the known `ids` and the distribution [V] each was drawn from (one-hot when greedy)."""
    trunk, known = modules.trunk, torch.tensor([ids])
    length = len(ids) - 1  # the newest token has no hidden state yet
    positions = torch.arange(length)
    state = trunk(known[:, :length], positions, attend)
    drafts: list[int] = []
    laws: list[Tensor] = []
    for m in range(modules.num_modules):
        following = torch.cat((known, torch.tensor([drafts], dtype=torch.long)), 1)
        state = modules.forward_module(m, state, following[:, m + 1 : m + 1 + length], positions, attend)
        law = distribution(modules.draft_logits(m, state[0, -1]), temperature)
        index = torch.multinomial(law, 1, generator=generator)
        full = torch.zeros(trunk.config.vocab_size)
        full[modules.draft_ids(torch.arange(len(law)))] = law
        drafts.append(int(modules.draft_ids(index)))
        laws.append(full)
    return drafts, laws


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """[V] logits -> [V] probabilities; temperature 0 is one-hot."""
    if temperature == 0:
        return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1.0)
    return (logits / temperature).softmax(-1)


@torch.no_grad()
def stepwise_acceptance(
    modules: MtpModules, prompts: list[list[int]], new_tokens: int, temperature: float, seed: int = 0
) -> Acceptance:
    """Takes every step as an engine would, everything recomputed each time: slow, and the reference."""
    trunk, attend, accepted = modules.trunk, attention_for(modules), list[int]()
    generator, count = torch.Generator().manual_seed(seed), modules.num_modules
    eos = set(trunk.config.eos_token_ids)
    for prompt in tqdm(prompts, desc=f"sampled at {temperature}", mininterval=10):
        ids = list(prompt)
        hidden = trunk(torch.tensor([ids]), torch.arange(len(ids)), attend)
        first = distribution(trunk.logits(hidden[0, -1]), temperature)
        ids.append(int(torch.multinomial(first, 1, generator=generator)))
        while len(ids) + count <= len(prompt) + new_tokens and ids[-1] not in eos:
            drafts, laws = propose(modules, ids, attend, temperature, generator)
            hidden = trunk(torch.tensor([ids + drafts]), torch.arange(len(ids) + count), attend)
            logits = trunk.logits(hidden[0, len(ids) - 1 :])
            good = 0
            for m, draft in enumerate(drafts):
                p, q = distribution(logits[m], temperature), laws[m]
                if float(torch.rand(1, generator=generator)) * float(q[draft]) >= float(p[draft]):
                    ids.append(int(torch.multinomial((p - q).clamp(min=0), 1, generator=generator)))
                    break
                good += 1
                ids.append(draft)
                if draft in eos:
                    break
            else:
                ids.append(
                    int(torch.multinomial(distribution(logits[count], temperature), 1, generator=generator))
                )
            accepted.append(good)
    return Acceptance(rates(accepted, count), len(accepted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trunk", type=Path)
    parser.add_argument("modules", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--stepwise", action="store_true", help="take the steps one by one also when greedy")
    parser.add_argument("--limit", type=int, help="use only the first prompts")
    parser.add_argument("--write", action="store_true", help="keep the figures in PROMPTS.json")
    args = parser.parse_args()
    trunk = load_transformer(args.trunk, "float32")
    modules = load_mtp(args.modules, trunk, "float32", trunk_digest(args.trunk))
    document: dict[str, Any] = json.loads(args.prompts.read_text())
    prompts = document["prompts"][: args.limit]
    if args.temperature == 0 and not args.stepwise:
        result = greedy_acceptance(modules, prompts, args.new_tokens)
    else:
        result = stepwise_acceptance(modules, prompts, args.new_tokens, args.temperature)
    figures = {
        "temperature": args.temperature,
        "new_tokens": args.new_tokens,
        "prompts": len(prompts),
        "steps": result.steps,
        "per_position": [round(rate, 4) for rate in result.per_position],
        "acceptance_length": round(result.length, 4),
    }
    print(json.dumps(figures))
    if args.write:
        document.setdefault("measured", {})["greedy" if args.temperature == 0 else f"t{args.temperature}"] = (
            figures
        )
        args.prompts.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
