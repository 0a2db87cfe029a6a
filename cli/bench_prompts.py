"""Prompts of a load test: a file's, or sentences of our own shuffled into texts of the wanted length.

Sentences rather than random token ids: what a drafter accepts on noise says nothing about text.
"""

import json
import random
from pathlib import Path

from common.errors import ConfigError
from common.tokenizer import Tokenizer

SENTENCES = (
    "A cache is a promise that the work done once will not have to be done again.",
    "The river rises in the hills to the north and reaches the sea after two hundred miles.",
    "To open a file for reading, pass its name and the mode to the function that returns a file object.",
    "She asked the library for an older edition, because the maps in the new one had been left out.",
    "When the queue is full, the oldest request is answered first and the newest one is asked to wait.",
    "Bread needs flour, water, salt and time, and most of what goes wrong goes wrong with the time.",
    "The index is rebuilt at night, so that the queries of the morning find every document in its place.",
    "A prime number has exactly two divisors, and there is no largest one among them.",
    "If the connection is lost, the client tries again after one second, then after two, then after four.",
    "The committee met on Tuesday to discuss the bridge, its cost, and the trees that stand in its way.",
    "Sound travels faster in water than in air, and faster still in a bar of steel.",
    "Each worker reads its own part of the table and sends the sum to the one that started the query.",
    "The old harbour is quiet in winter, when only the mail boat and a few fishermen come and go.",
    "An exception that nobody catches ends the program and prints where it came from.",
    "Plants turn light into sugar, and the rest of the living world turns that sugar into everything else.",
    "The parameter sets how many rows are fetched at a time; larger values need more memory.",
    "He repaired the clock with a spring from another clock, and both of them have been late ever since.",
    "Packets may arrive in any order, so each of them carries a number that says where it belongs.",
    "The museum keeps the letters in a dark room, for the ink has already lost most of its colour.",
    "A list keeps the order of its items, a set forgets it, and a dictionary remembers it by key.",
)
QUESTIONS = (
    "What is photosynthesis, and why does it matter?",
    "Give me three tips for learning to play the piano.",
    "Explain how a refrigerator keeps food cold.",
    "Write a short paragraph about the history of bicycles.",
    "Why do we have leap years?",
    "What should I pack for a week of hiking in the mountains?",
    "Explain the difference between weather and climate.",
    "How does a bill become a law?",
    "Write a Python function that reverses a string.",
    "What are the benefits of drinking enough water?",
    "Describe the water cycle in simple terms.",
    "Why is sleep important for memory?",
    "How do vaccines protect us from diseases?",
    "Give me an easy recipe for vegetable soup.",
    "What is inflation, and how does it affect savings?",
    "Explain what an operating system does.",
    "How can a small town attract more visitors?",
    "Why do leaves change colour in autumn?",
    "What makes a good teacher?",
    "Explain how a telescope works.",
    "Write a short story about a lighthouse keeper.",
    "How do plants survive in the desert?",
    "What is the purpose of a database index?",
    "Give me advice for a first job interview.",
)
CHARACTERS_PER_TOKEN = 4  # of English text; a start, refined by asking the server


def shuffled_text(rng: random.Random, num_characters: int) -> str:
    """At least ``num_characters`` of text, cut at a word."""
    words: list[str] = []
    length = 0
    while length < num_characters:
        for word in rng.choice(SENTENCES).split():
            words.append(word)
            length += len(word) + 1
            if length >= num_characters:
                break
    return " ".join(words)


def read_token_prompts(file: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of a file: .json with `prompts`, .jsonl with `prompt` (ids or text), or lines of text."""
    try:
        if file.suffix == ".json":
            prompts = json.loads(file.read_text(encoding="utf-8"))["prompts"]
        elif file.suffix == ".jsonl":
            lines = file.read_text(encoding="utf-8").splitlines()
            prompts = [json.loads(line)["prompt"] for line in lines if line.strip()]
        else:
            prompts = read_prompts(file)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--prompts {file}: {error!r}; expected `prompts` or lines with `prompt`") from None
    ids = [tokenizer.encode(p) if isinstance(p, str) else [int(i) for i in p] for p in prompts]
    if not ids or not all(ids):
        raise ConfigError(f"--prompts {file}: no prompts in it, or an empty one")
    return ids


def read_prompts(file: Path) -> list[str]:
    """One prompt a line: JSON objects with `prompt` (.jsonl), else plain text. Raises ConfigError."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        prompts = [json.loads(line)["prompt"] for line in lines] if file.suffix == ".jsonl" else lines
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--prompts {file}: {error!r}; expected a text file, or .jsonl with `prompt`"
        ) from None
    if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError(f"--prompts {file}: no prompts in it, or one that is not a string")
    return prompts
