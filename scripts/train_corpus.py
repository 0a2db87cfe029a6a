"""Documentation packages to text, text to a tokenizer and token files: the corpus of `baton-tiny`.

Reads Debian packages that were extracted with `dpkg -x PACKAGE.deb ROOT/PACKAGE` and writes, into one folder,
`tokenizer.json`, `train.bin` and `val.bin` (uint16 token ids, documents separated by <|endoftext|>) and
`val_docs.json` (the text of the held-out documents). A document is held out as a whole, about one in sixty.
Licences of the packages are listed in docs/mtp-training.md; all are permissive.
"""

import argparse
import gzip
import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

SPECIAL_TOKENS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>"]
VOCAB_SIZE = 4096
CHAT_SHARE = 0.10  # of the sections that have a heading, rendered a second time as question and answer
QUESTIONS = ["{}", "What is {}?", "Explain {}.", "Tell me about {}.", "How do I use {}?"]

RUST_BOOKS = re.compile(
    r"/html/(book|reference|rust-by-example|nomicon|rustc|cargo|edition-guide|embedded-book|rustdoc|unstable-book)/"
)
SKIP_TAGS = {"script", "style", "nav", "head", "svg", "button", "form", "footer", "select"}
VOID_TAGS = {"br", "img", "meta", "link", "hr", "input", "col", "wbr", "area", "base", "param", "source"}
BLOCK_TAGS = set(
    [
        "p",
        "div",
        "ul",
        "ol",
        "h5",
        "h6",
        "table",
        "tr",
        "dl",
        "dt",
        "dd",
        "section",
        "blockquote",
        "pre",
        "article",
    ]
)
SKIP_CLASSES = re.compile(
    r"sphinxsidebar|related|navheader|navfooter|toc\b|footer|headerlink|breadcrumb|sidebar|menubar|quickview"
    r"|up-link|page-header|langavail|nav-"
)
ASCII_FORMS = str.maketrans(
    {
        "¶": "",
        "\u00a0": " ",
        "\u2019": "'",
        "\u2018": "'",
        "“": '"',
        "”": '"',
        "—": "--",
        "\u2013": "-",
        "…": "...",
    }
)


class TextOfHtml(HTMLParser):
    """Collects the text of one page in `parts`: headings as `#`, list items as `*`, navigation left out."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.open: list[tuple[str, bool]] = []  # (tag, whether it and what it holds is left out)
        self.skipping = 0
        self.preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in VOID_TAGS:
            if tag == "br" and not self.skipping:
                self.parts.append("\n")
            return
        values = dict(attrs)
        names = f"{values.get('class') or ''} {values.get('id') or ''}"
        by_class = tag not in ("html", "body", "main") and "page-wrapper" not in names
        skip = tag in SKIP_TAGS or (by_class and bool(SKIP_CLASSES.search(names)))
        self.open.append((tag, skip))
        self.skipping += skip
        if self.skipping:
            return
        if tag == "pre":
            self.preformatted += 1
            self.parts.append("\n\n")
        elif tag == "li":
            self.parts.append("\n* ")
        elif tag in ("h1", "h2", "h3", "h4"):
            self.parts.append("\n\n" + "#" * int(tag[1]) + " ")
        elif tag in ("td", "th"):
            self.parts.append("  ")
        elif tag in BLOCK_TAGS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        depth = next((i for i in range(len(self.open) - 1, -1, -1) if self.open[i][0] == tag), None)
        if depth is None:
            return
        self.skipping -= sum(skip for _, skip in self.open[depth:])
        del self.open[depth:]
        if self.skipping:
            return
        if tag == "pre":
            self.preformatted = max(0, self.preformatted - 1)
        if tag in ("pre", "p", "h1", "h2", "h3", "h4", "h5", "h6", "dl", "table"):
            self.parts.append("\n\n")
        elif tag in BLOCK_TAGS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.parts.append(data if self.preformatted else re.sub(r"\s+", " ", data))


def html_to_text(page: str) -> str:
    """The readable text of a documentation page, in plain ASCII punctuation."""
    parser = TextOfHtml()
    parser.feed(page)
    text = "".join(parser.parts).translate(ASCII_FORMS)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return tidy(re.sub(r"\n +(?=[*#])", "\n", text))


def tidy(text: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def package_files(root: Path) -> Iterator[Path]:
    """The files of the extracted packages that hold prose, in a fixed order."""

    def pick(package: str, pattern: str) -> list[Path]:
        found = sorted(p for p in (root / package).rglob(pattern) if p.is_file() and not p.is_symlink())
        if not found:
            raise FileNotFoundError(f"no {pattern} under {root / package}: extract the package there first")
        return found

    yield from (p for p in pick("python3.11-doc", "*.rst.txt") if "/_sources/" in str(p))
    yield from pick("postgresql-doc-15", "*.html")
    yield from pick("sqlite3-doc", "*.html")
    for page in pick("python-django-doc", "*.html"):
        if "/_modules/" not in str(page) and "genindex" not in page.name:
            yield page
    yield from (p for p in pick("apache2-doc", "*.html*") if "/en/" in str(p) or p.name.endswith(".html.en"))
    yield from pick("nodejs-doc", "*.md*")
    for page in pick("rust-doc", "*.html"):
        old_edition = re.search(r"/book/(first|second|2018)-edition/", str(page))
        if RUST_BOOKS.search(str(page)) and page.name != "print.html" and not old_edition:
            yield page


def read_documents(root: Path) -> list[str]:
    """Distinct, mostly-ASCII documents of at least 200 characters."""
    documents: dict[bytes, str] = {}
    for path in tqdm(list(package_files(root)), desc="documents", unit="file"):
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf8", "replace")
        text = html_to_text(text) if ".html" in path.name else tidy(text)
        if len(text) >= 200 and sum(map(str.isascii, text)) >= 0.97 * len(text):
            documents.setdefault(hashlib.sha256(text.encode()).digest(), text)
    return list(documents.values())


def split_documents(documents: list[str], seed: int = 0) -> tuple[list[str], list[str]]:
    """Shuffled, then (train, held out)."""
    shuffled = documents.copy()
    random.Random(seed).shuffle(shuffled)
    held_out = max(1, len(shuffled) // 60)
    return shuffled[held_out:], shuffled[:held_out]


def sections(document: str) -> Iterator[tuple[str, str]]:
    """(heading, body) of each section of 100 to 1500 characters; headings are `# x` or underlined lines."""
    pieces = re.split(r"^(?:#{1,4} (.+)|(\S.*)\n[=~^*\"-]{4,})\n", document, flags=re.MULTILINE)
    for at in range(1, len(pieces) - 2, 3):
        heading, body = (pieces[at] or pieces[at + 1]).strip(), pieces[at + 2].strip()
        if 3 <= len(heading) <= 80 and 100 <= len(body) <= 1500:
            yield heading, body


def train_tokenizer(documents: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Byte-level BPE: every byte string can be encoded, no unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, documents: list[str], chat_share: float, seed: int = 0) -> np.ndarray:
    """Documents, each followed by <|endoftext|>, with some of their sections again in the form of a chat."""
    rng = random.Random(seed)
    texts: list[str] = []
    for document in documents:
        texts.append(document + "<|endoftext|>")
        for heading, body in sections(document):
            if rng.random() < chat_share:
                question = rng.choice(QUESTIONS).format(heading)
                texts.append(f"<|user|>\n{question}\n<|assistant|>\n{body}<|endoftext|>")
    ids: list[np.ndarray] = []
    for at in tqdm(range(0, len(texts), 64), desc="tokens", unit="batch"):
        ids += [np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch(texts[at : at + 64])]
    return np.concatenate(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="folder that holds one folder per extracted package")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train, held_out = split_documents(read_documents(args.root))
    tokenizer = train_tokenizer(train[::2])
    tokenizer.save(str(args.out / "tokenizer.json"))
    for name, documents, chat_share in (("train", train, CHAT_SHARE), ("val", held_out, 0.0)):
        ids = token_stream(tokenizer, documents, chat_share)
        ids.tofile(args.out / f"{name}.bin")
        num_bytes = sum(len(d.encode()) for d in documents)
        print(f"{name}: {len(documents)} documents, {num_bytes} bytes, {len(ids)} tokens")
    (args.out / "val_docs.json").write_text(json.dumps(held_out))


if __name__ == "__main__":
    main()
