"""Deliberate breaks of the rules of exactness, each one text changed, and what catches each.

`python -m tests.mutations` runs them all (or those whose names contain a word), `--markdown` writes the table
of docs/exactness.md. The first ones are the controls of the design; the others are what a reviewer would try.
"""

import sys
import time
from dataclasses import replace

from tests.mutation_run import ROOT, Mutation, Result, Schedules, load_libraries, run_in_child

PAGE = ROOT / "docs" / "exactness.md"
BEGIN, END = "<!-- mutations: begin -->", "<!-- mutations: end -->"
SPECULATOR = "common/engine/speculator.py"
SCHEDULER = "common/engine/scheduler.py"
RULES = "common/engine/rules.py"
MANAGER = "common/kv_cache/manager.py"
LAYOUT = "common/kv_cache/layout.py"
HASH = "common/block_hash.py"
RUNNER = "common/engine/model_runner.py"
STATES = "common/engine/state_plan.py"

ONE, PAIR = Schedules("full", 4, False), Schedules("full", 4, True)

MUTATIONS = (
    # ---- 1. what a step does
    Mutation(
        "r-1 rows: re-prefill counts rejections instead of N-1-a",
        SPECULATOR,
        "return max(0, min(entry.start, exact_upto + 1 - self.num_modules))",
        "return max(0, entry.start - max(0, len(entry.drafts) - (exact_upto + 1 - len(entry.known)) - 1))",
        ONE,
    ),
    Mutation(
        "write only newly exact slots: provisional ones keep an older draft",
        SPECULATOR,
        "pads = (positions < rows.start) & (reads <= rows.exact_upto)",
        "pads = (positions < rows.start) & ((reads <= rows.exact_upto) | (reads > rows.last_known))",
        ONE,
    ),
    Mutation(
        "clamp missing: F may fall below 0 for a short prompt",
        SPECULATOR,
        "return max(0, min(entry.start, exact_upto + 1 - self.num_modules))",
        "return min(entry.start, exact_upto + 1 - self.num_modules)",
        ONE,
    ),
    Mutation(
        "K counts the trunk's own new token: one row too few is re-prefilled",
        SPECULATOR,
        "exact_upto = before + verified.num_accepted  # K",
        "exact_upto = before + len(verified.tokens)",
        ONE,
    ),
    Mutation(
        "the carry holds rows of the last step alone",
        SPECULATOR,
        "self._carry[entry.request_id] = joined[-(n - 1) :].clone()",
        "self._carry[entry.request_id] = kept[-(n - 1) :].clone()",
        ONE,
    ),
    Mutation(
        "drafts read as known lookahead: mid-prefill slots are written from nothing",
        SPECULATOR,
        "tokens = [*entry.known[first + 1 : end + n], *verified.tokens][: last_known - first]",
        "tokens = [*entry.known[first + 1 : end], *verified.tokens][: last_known - first]",
        ONE,
    ),
    # ---- 2. chunk boundaries
    Mutation(
        "no reserve rule: a chunk may leave fewer than N tokens",
        RULES,
        "        num_new -= lookahead - remaining\n",
        "        pass\n",
        "tests/unit/test_scheduler.py::test_a_chunk_ends_the_prompt_or_leaves_at_least_n_tokens",
    ),
    Mutation(
        "drafts may go past the longest sequence",
        RULES,
        "left = min(request.sampling.max_tokens - request.num_output_tokens, limit - request.num_tokens)",
        "left = request.sampling.max_tokens - request.num_output_tokens",
        ONE,
    ),
    # ---- 3. registering, holding and hitting blocks
    Mutation(
        "register too early: at num_computed",
        RULES,
        "return max(0, min(request.num_computed, request.num_tokens - lookahead))",
        "return request.num_computed",
        Schedules("window", 4, False),
    ),
    Mutation(
        "limit counts new drafts",
        RULES,
        "return max(0, min(request.num_computed, request.num_tokens - lookahead))",
        "return max(0, min(request.num_computed, request.num_tokens + len(request.drafts) - lookahead))",
        Schedules("window", 4, False),
    ),
    Mutation(
        "visible too early: registered when the step is scheduled",
        SCHEDULER,
        "        return ScheduledRequest(\n            request_id=request.request_id,",
        "        self.kv.register_final(request, request.num_computed + num_new)\n"
        "        return ScheduledRequest(\n            request_id=request.request_id,",
        ONE,
    ),
    Mutation(
        "the hash covers tokens to e+N-2 only",
        HASH,
        "hasher.update(packed[offset : offset + covered])",
        "hasher.update(packed[offset : offset + covered - _TOKEN_BYTES])",
        ONE,
    ),
    Mutation(
        "one lookahead token in the hash with N modules",
        HASH,
        "hasher.update(packed[offset : offset + covered])",
        "hasher.update(packed[offset : offset + stride + _TOKEN_BYTES])",
        ONE,
    ),
    Mutation(
        "no lookahead in the hash",
        HASH,
        "hasher.update(packed[offset : offset + covered])",
        "hasher.update(packed[offset : offset + stride])",
        ONE,
    ),
    Mutation(
        "no drop with plain hashes",
        MANAGER,
        "        if self.drop_last_block:",
        "        if False:",
        ONE,
    ),
    Mutation(
        "plain hashes: a block counts whatever followed it where it was computed",
        MANAGER,
        "checked=self.num_unhashed > 0",
        "checked=False",
        Schedules("full", 1, True),
    ),
    Mutation(
        "a hit leaves nothing to compute",
        MANAGER,
        "leave = max(self.hasher.num_lookahead, 1)",
        "leave = 0",
        Schedules("full", 0, False),
    ),
    Mutation(
        "window X = N-2",
        LAYOUT,
        "extra_retained_tokens=max(0, num_modules - 1) if has_modules else 0,",
        "extra_retained_tokens=max(0, num_modules - 2) if has_modules else 0,",
        Schedules("window", 4, False),
    ),
    Mutation(
        "a window's block is freed one position early",
        LAYOUT,
        "return max(0, num_computed - self.window + 1 - self.extra_retained_tokens)",
        "return max(0, num_computed - self.window + 2 - self.extra_retained_tokens)",
        Schedules("window", 1, False),
    ),
    Mutation(
        "a hit looks at full groups only",
        MANAGER,
        "find = _full_hit if group.keeps_all else _window_hit",
        "find = _full_hit if group.keeps_all else lambda is_cached, limit, group: limit",
        Schedules("window", 2, False),
    ),
    Mutation(
        "a stored state is that of the mark before: checkpoints off by one",
        STATES,
        "sources.append(at + i)",
        "sources.append(at + max(0, i - 1))",
        Schedules("hybrid", 2, False),
    ),
    Mutation(
        "states are kept past a rejected draft",
        RUNNER,
        "e.start + e.num_new + v.num_accepted for e, v in zip(batch.entries, verified, strict=True)",
        "e.end for e, v in zip(batch.entries, verified, strict=True)",
        Schedules("hybrid", 2, False),
    ),
    Mutation(
        "rejected drafts count as computed",
        SCHEDULER,
        "request.num_computed = entry.start + entry.num_new + result.num_accepted",
        "request.num_computed = entry.start + entry.num_new + len(entry.drafts)",
        ONE,
    ),
    # ---- 4. the hand-over
    Mutation(
        "drop the carry row, no fall-back: D starts at C without it",
        SCHEDULER,
        "if upto <= safe or (has_carry and upto < request.num_tokens):",
        "if upto < request.num_tokens:",
        PAIR,
    ),
    Mutation(
        "fall-back off: D re-prefills nothing below the cut",
        SPECULATOR,
        "carry = self._take_carry(entry, hidden)",
        "carry = self._take_carry(entry, hidden)\n"
        "        first = q if entry.handover_carry is not None else first",
        PAIR,
    ),
    Mutation(
        "the carry row is another position's",
        SPECULATOR,
        "rows = carry if at_most is None else carry[-at_most:]",
        "rows = carry if at_most is None else carry[:at_most]",
        PAIR,
    ),
    Mutation(
        "one token past a chunk's end, or past P's cut, is read wrong",
        SPECULATOR,
        "next_ids[: min(len(tokens), needed + n)] = tokens[: needed + n]",
        "next_ids[: min(len(tokens), needed + n)] = tokens[: needed + n]\n"
        "        next_ids[end - first] *= entry.samples",
        PAIR,
    ),
    Mutation(
        "the prompt is cut on P: it guesses the tokens that it was given",
        "prefill_node/node.py",
        "            message.token_ids,\n            message.sampling or",
        "            message.token_ids[: message.cut],\n            message.sampling or",
        "tests/integration/test_hybrid_nodes.py::test_the_pair_is_exact_on_real_nodes[backoff]",
    ),
    Mutation(
        "blocks are paired by list length, not by absolute position",
        MANAGER,
        "wanted[g] = {i: table[i] for i in range(first, end) if table[i] != NULL_BLOCK}",
        "wanted[g] = dict(enumerate(table[i] for i in range(first, end) if table[i] != NULL_BLOCK))",
        Schedules("window", 4, True),
    ),
    Mutation(
        "a broken transfer's last blocks are kept though not final",
        SCHEDULER,
        "self.kv.register_final(request, min(final_upto, max(0, request.num_tokens - self.config.tail)))",
        "self.kv.register_final(request, final_upto + self.kv.block_size)",
        PAIR,
    ),
    Mutation(
        "a fork shares the block that it recomputes",
        SCHEDULER,
        "shared = max(0, prompt_len - self.config.tail)",
        "shared = prompt_len",
        ONE,
    ),
    # ---- 5. verification and sampling
    Mutation(
        "the first draft is accepted unseen",
        "common/engine/sampler.py",
        "while accepted < len(drafts) and drafts[accepted] == best[accepted]:",
        "while accepted < len(drafts) and (accepted == 0 or drafts[accepted] == best[accepted]):",
        ONE,
    ),
    Mutation(
        "q is left out where an unseeded request's draft is accepted",
        "common/engine/sampler.py",
        "if valid and rows[j, draft] > math.log(u) + log_q[draft]:",
        "if valid and rows[j, draft] > math.log(u):",
        "tests/unit/test_sampler.py::test_unseeded_tokens_have_the_targets_distribution",
    ),
    Mutation(
        "accept-or-residual for a seeded request",
        RUNNER,
        "if sampling.seed is not None:",
        "if sampling.seed is not None and not entry.drafts:",
        ONE,
    ),
)


def markdown() -> str:
    """The table: what is broken, how, and what catches it."""
    lines = ["| broken rule | one-line patch | caught by |", "| --- | --- | --- |"]
    for m in MUTATIONS:
        patch = f"`{m.file}`: `{_line(m.old)}` becomes `{_line(m.new)}`"
        catcher = f"`{m.catcher}`" if isinstance(m.catcher, str) else str(m.catcher)
        lines.append(f"| {m.name} | {patch} | {catcher} |")
    return "\n".join(lines)


def _line(code: str) -> str:
    return " ".join(code.split()).replace("|", "\\|")


def updated(page: str) -> str:
    """docs/exactness.md with the table as it is now."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{markdown()}\n\n{END}{rest.split(END)[1]}"


def main(words: list[str]) -> int:
    """Exit code 0 if every mutation is caught."""
    if words == ["--markdown"]:
        PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    load_libraries()
    verdicts, seen_by = [], list[Schedules]()
    for mutation in MUTATIONS:
        if not all(word in mutation.name for word in words):
            continue
        result = _report(mutation.name, mutation, (mutation.catcher,))
        verdicts.append(result.verdict == "caught")
        if isinstance(mutation.catcher, Schedules) and verdicts[-1]:  # the one schedule that saw it
            seed = int(result.detail.partition(":")[0])
            seen_by.append(replace(mutation.catcher, first=seed, count=1))
    # Tests that catch something are tests of the suite, which runs them on the source as it is.
    result = _report("the same schedules, nothing changed", None, tuple(dict.fromkeys(seen_by)))
    return 0 if all(verdicts) and result.verdict == "passed" else 1


def _report(name: str, mutation: Mutation | None, catchers: tuple[Schedules | str, ...]) -> Result:
    started_s = time.monotonic()
    result = run_in_child(mutation, catchers)
    took_s = time.monotonic() - started_s
    print(f"{result.verdict:<8}{took_s:5.1f} s  {name}\n    {result.detail}", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
