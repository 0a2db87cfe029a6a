"""Prose of the documentation packages as if a chat model had answered with it: `train_features` input.

    python -m scripts.train_prose PACKAGES TRUNK OUT.jsonl

A section's heading becomes the question, its paragraphs of plain prose the answer (at most 256 tokens). The
text is not the trunk's own, which is why its lines say temperature 1.
"""

import argparse
import json
import random
import re
from pathlib import Path

from tokenizers import Tokenizer

from scripts.train_answers import prompt_of
from scripts.train_corpus import QUESTIONS, read_documents, sections

MIN_CHARACTERS, MAX_CHARACTERS, MAX_TOKENS = 350, 1400, 256


def is_prose(paragraph: str) -> bool:
    """A paragraph of sentences: not short, starts with a capital, hardly anything but letters in it."""
    letters = sum(c.isalpha() or c in " ,.'" for c in paragraph)
    return len(paragraph) > 120 and paragraph[0].isupper() and letters > 0.93 * len(paragraph)


def prose_of(body: str) -> str:
    """The prose paragraphs of a section, each on one line."""
    paragraphs = (re.sub(r"\s+", " ", paragraph).strip() for paragraph in body.split("\n\n"))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph and is_prose(paragraph))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", type=Path, help="folder that holds one folder per extracted package")
    parser.add_argument("trunk", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.trunk / "tokenizer.json"))
    documents, rng = read_documents(args.packages), random.Random(0)
    rng.shuffle(documents)
    found = [(heading, prose_of(body)) for document in documents for heading, body in sections(document)]
    found = [(heading, text[:MAX_CHARACTERS]) for heading, text in found if len(text) > MIN_CHARACTERS]
    rng.shuffle(found)
    with args.out.open("w") as file:
        for heading, text in found:
            question = rng.choice(QUESTIONS).format(heading)
            prompt = tokenizer.encode(prompt_of(question), add_special_tokens=False).ids
            response = tokenizer.encode(text, add_special_tokens=False).ids[:MAX_TOKENS]
            file.write(json.dumps({"prompt": prompt, "response": response, "temperature": 1.0}) + "\n")


if __name__ == "__main__":
    main()
