"""Conversations that share beginnings: the workload of `benchmarks.prefix_cache`. Pure, drawn from a seed.

All share a system prompt. Conversations of one topic also share a document, and the first two of a topic the
first question with its answer, before they part. Documents and questions are of many lengths, so that
conversations part at all places within a block.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cli.bench_prompts import QUESTIONS, SENTENCES, shuffled_text
from common.tokenizer import Tokenizer

SYSTEM = (
    "You are a careful assistant. You answer in plain words and in complete sentences, and you keep to what "
    "was asked. Where a document was given you rely on it first and say so when it does not hold the answer. "
    "You never invent names, numbers or quotations. If a question can be read in two ways, you choose the "
    "more useful one and say which one it was. You keep your answers short."
)
PER_TOPIC = 3  # two that part after the first answer, one that parts after the document
DOCUMENT_CHARACTERS = (400, 900)


@dataclass(frozen=True)
class Conversation:
    """What the user says, turn by turn; the answers between are the model's own."""

    topic: int
    user_turns: tuple[str, ...]


def conversations(num_topics: int, num_turns: int, seed: int) -> list[Conversation]:
    """`PER_TOPIC` conversations of ``num_turns`` for each topic; the same ones for the same seed."""
    rng = random.Random(seed)
    made = []
    for topic in range(num_topics):
        document = "Read this first. " + shuffled_text(rng, rng.randint(*DOCUMENT_CHARACTERS))
        openings = rng.sample(QUESTIONS, 2)
        for opening in (openings[0], openings[0], openings[1]):
            later = [_question(rng) for _ in range(num_turns - 1)]
            made.append(Conversation(topic, (f"{document}\n\n{opening}", *later)))
    return made


def _question(rng: random.Random) -> str:
    reminders = rng.sample(SENTENCES, rng.randint(0, 2))
    return " ".join([rng.choice(QUESTIONS), *reminders])


def prompt_of(tokenizer: Tokenizer, conversation: Conversation, answers: Sequence[str]) -> list[int]:
    """Token ids of the turn after ``answers``: through the chat template, or as text where there is none."""
    user_turns = conversation.user_turns[: len(answers) + 1]
    if not tokenizer.has_chat_template:
        texts = [SYSTEM, user_turns[0]]
        for answer, user in zip(answers, user_turns[1:], strict=True):
            texts += [answer, user]
        return tokenizer.encode("\n\n".join(texts) + "\n\n")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user_turns[0]}]
    for answer, user in zip(answers, user_turns[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": user}]
    return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
