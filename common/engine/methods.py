"""The place where a method of speculation is chosen, from the options and what the modules folder has."""

from collections.abc import Callable
from dataclasses import dataclass

from common.config import EngineOptions
from common.engine.drafter import Choice, Drafter
from common.engine.ngram_drafter import NgramDrafter
from common.engine.recursive_speculator import RecursiveSpeculator
from common.engine.speculation import (
    NO_SPECULATION,
    Speculation,
    lookup,
    multi_module,
    recursive_module,
)
from common.engine.speculator import MtpSpeculator
from common.errors import ConfigError
from common.kv_cache.storage import KVStorage
from common.model.mtp import MtpModules

DEFAULT_NGRAM_DRAFTS = 4


@dataclass(frozen=True)
class Method:
    """``num_modules``: modules that have KV here. ``make(modules, storage, vocab_size, choose)`` gives the
    drafter; ``choose`` is None unless its tokens are to be replaced."""

    num_modules: int
    speculation: Speculation
    make: Callable[[MtpModules | None, KVStorage, int, Choice | None], Drafter | None]


def choose_method(modules: MtpModules | None, options: EngineOptions) -> Method:
    """Raises ConfigError when more drafts are wanted than the modules can give."""
    wanted = options.num_speculative_tokens
    if options.speculative_method == "ngram" and wanted != 0:
        return ngram_method(DEFAULT_NGRAM_DRAFTS if wanted < 0 else wanted)
    available = 0 if modules is None else modules.num_modules
    if wanted < 0:
        wanted = available
    if available == 1 and wanted > 1:
        return recursive_method(wanted)
    if wanted > available:
        raise ConfigError(
            f"num_speculative_tokens is {wanted}, the modules folder has {available} MTP modules; "
            f"use at most {available} (or -1 for all)"
        )
    return multi_method(wanted)


def multi_method(count: int) -> Method:
    """``count`` modules, one draft each; none for 0."""
    if count == 0:
        return Method(0, NO_SPECULATION, lambda modules, storage, vocab_size, choose: None)

    def make(
        modules: MtpModules | None, storage: KVStorage, vocab_size: int, choose: Choice | None
    ) -> Drafter:
        assert modules is not None
        return MtpSpeculator(modules, count, storage, choose)

    return Method(count, multi_module(count), make)


def recursive_method(count: int) -> Method:
    """Module 0, applied ``count`` times."""

    def make(
        modules: MtpModules | None, storage: KVStorage, vocab_size: int, choose: Choice | None
    ) -> Drafter:
        assert modules is not None
        return RecursiveSpeculator(modules, count, storage, choose)

    return Method(1, recursive_module(count), make)


def ngram_method(count: int) -> Method:
    """Up to ``count`` tokens that followed the same n-gram before."""
    return Method(
        0, lookup(count), lambda modules, storage, vocab_size, choose: NgramDrafter(count, vocab_size, choose)
    )


def check_dropped_block(block_size: int, speculation: Speculation) -> None:
    """Plain hashes are exact only if the dropped block covers all slots that another reader's tokens shaped
    (02-exactness 3; the bound is tight). Raises ConfigError naming both numbers."""
    if block_size < speculation.lookahead:
        raise ConfigError(
            f"disable_lookahead_block_hashes drops the last {block_size} positions of a hit (block_size), "
            f"but this drafter looks {speculation.lookahead} tokens ahead; raise block_size to at least "
            f"{speculation.lookahead}, or leave the lookahead hashes on"
        )
