"""Random hybrid models as nodes take them: with a tokenizer whose tokens are the 256 bytes."""

import dataclasses
from pathlib import Path

import torch
from tokenizers import Tokenizer as TokenizersTokenizer
from tokenizers import decoders, models, pre_tokenizers

from cli.local_config import ClusterConfig
from cli.local_nodes import EngineFactory
from cli.schedules.random_models import random_weights
from common.engine.build import assemble
from common.model.registry import ModelFiles
from common.tokenizer import Tokenizer

SIZES = (1, 2, 4, 8)  # N
BLOCK_SIZE, NUM_BLOCKS = 4, 256  # small: windows of 6 tokens leave blocks, prompts fill several


def random_factory(config: ClusterConfig, num_modules: int) -> EngineFactory:
    """Engines over the random hybrid with N modules, in float32; of ``config`` the rest."""
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    engine = dataclasses.replace(
        config.engine, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, num_speculative_tokens=num_modules
    )
    model = dataclasses.replace(config.model, dtype="float32")
    config = dataclasses.replace(config, model=model, engine=engine)
    weights = random_weights("hybrid", num_modules, 256)
    files = ModelFiles(Path("random"), None, weights.name)
    built = assemble(weights.trunk, weights.modules, byte_tokenizer(), files, weights.name, model, engine)
    return EngineFactory(config, built)


def byte_tokenizer() -> Tokenizer:
    """One token a byte, none special."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = TokenizersTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Tokenizer(tokenizer)
