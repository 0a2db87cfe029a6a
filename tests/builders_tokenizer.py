"""Small tokenizers of both kinds, trained in the test: byte-level BPE, and pieces with byte fallback."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog does not mind",
    "Grüße aus Köln: naïve façades, crème brûlée",
    "日本語のテキスト、そして漢字",
    "emoji 😀 and 👩‍👩‍👧 in a row 😀😀",
    "def f(x):\n    return x + 1\n",
    "77 77 77 77 77 1977 1977 1977",  # so that digits merge unless something keeps them apart
]


def byte_level_tokenizer(vocab_size: int = 400) -> Tokenizer:
    """Byte-level BPE with <|end|> as a special token; every byte is in the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def piece_tokenizer() -> Tokenizer:
    """Words with a leading mark for the space, bytes as <0xNN> where no piece fits, as in Llama 2."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"theanobüsç",
        "▁t",
        "▁th",
        "▁the",
        "an",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("a", "n")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer
