"""The training scripts on toy sizes: recorded steps, the walk of acceptance, a whole run of seconds."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from common.model.dense_attention import DenseAttention
from common.model.model_config import ModelConfig
from common.model.mtp import MtpModules
from common.model.mtp_config import MtpConfig
from common.model.transformer import DecoderBlock, Transformer
from common.model.weights import load_transformer, trunk_digest
from scripts.train_answers import answer, questions
from scripts.train_corpus import html_to_text, sections, token_stream, train_tokenizer
from scripts.train_decode import generate
from scripts.train_eval import agreement, greedy_acceptance, stepwise_acceptance, walk
from scripts.train_features import Recorded, held_out_topics, load_shards, record, topic_of
from scripts.train_modules import (
    Distillation,
    Recipe,
    batches,
    draft_vocabulary,
    feature_error,
    pad,
    token_counts,
)
from scripts.train_modules import Run as ModulesRun
from scripts.train_optim import Muon, block_matrices, learning_rate, orthogonalise
from scripts.train_plot import chart, ticks
from scripts.train_plot import main as plot
from scripts.train_prose import prose_of
from scripts.train_trunk import Run as TrunkRun
from scripts.train_trunk import tiny_config


def toy_config(vocab_size: int = 300) -> ModelConfig:
    return ModelConfig.from_json(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": vocab_size,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "intermediate_size": 48,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 1100,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "eos_token_id": 0,
        }
    )


def toy_modules(count: int = 3) -> MtpModules:
    trunk = Transformer(toy_config())
    trunk.reset_parameters(torch.Generator().manual_seed(3))
    with torch.no_grad():
        for parameter in trunk.blocks.parameters():  # large weights: greedy text that does not just repeat
            if parameter.dim() == 2:
                parameter.mul_(8.0)
    trunk.requires_grad_(False)
    modules = MtpModules(MtpConfig(num_modules=count, trunk_digest="toy"), trunk)
    modules.init_from_trunk()
    return modules.requires_grad_(False)


def test_page_becomes_text_without_navigation() -> None:
    body = "<nav>skip</nav><h2>Files</h2><p>Open a <b>file</b>.</p><ul><li>one</ul>"
    page = f"<html><head><title>x</title></head><body>{body}"
    assert html_to_text(page) == "## Files\n\nOpen a file.\n\n* one\n"


def test_sections_of_both_heading_styles() -> None:
    body = "word " * 40
    document = f"# First\n{body}\nSecond\n======\n{body}\n"
    assert [heading for heading, _ in sections(document)] == ["First", "Second"]


def test_token_stream_separates_documents_and_adds_chats() -> None:
    document = "# Open a file\n" + "Use open to read the file. " * 10 + "\n"
    tokenizer = train_tokenizer([document], vocab_size=300)
    ids = token_stream(tokenizer, [document, document], chat_share=1.0)
    assert ids.dtype == np.uint16
    assert (ids == tokenizer.token_to_id("<|endoftext|>")).sum() == 4
    assert (ids == tokenizer.token_to_id("<|assistant|>")).sum() == 2


def test_topics_are_held_out_whole() -> None:
    assert topic_of("Write a poem about black holes.") == "black holes"
    with pytest.raises(ValueError, match="no known template"):
        topic_of("Hello")
    topics = [str(i // 3) for i in range(60)]
    assert len(held_out_topics(topics)) == 2
    assert held_out_topics(topics) == held_out_topics(topics[::-1])


def test_generation_equals_dense_recomputation() -> None:
    trunk = toy_modules().trunk
    prompts = torch.randint(300, (2, 11), generator=torch.Generator().manual_seed(0))
    ids = generate(trunk, prompts, 12, 0.0, torch.Generator())
    attend = DenseAttention(trunk.config.layer_windows)
    logits = trunk.logits(trunk(ids, torch.arange(23), attend))
    assert torch.equal(logits[:, 10:-1].argmax(-1), ids[:, 11:])


def test_answers_end_at_eos_and_carry_the_trunks_hidden_states() -> None:
    trunk = toy_modules().trunk
    prompts = torch.randint(1, 300, (6, 7), generator=torch.Generator().manual_seed(5))
    ids = generate(trunk, prompts, 24, 0.0, torch.Generator())
    eos = int(ids[2, 15])  # some rows end here or there, and leave the batch
    answers = answer(trunk, prompts, 24, eos)
    for row, (tokens, hidden) in enumerate(answers):
        ends = [i for i in range(7, 31) if int(ids[row, i]) == eos]
        assert tokens.tolist() == ids[row, : ends[0] + 1 if ends else 31].tolist()
        expected = record(trunk, [tokens.tolist()])[0].float()
        assert torch.allclose(hidden.float(), expected, atol=0.02, rtol=0.02)
    assert len(answers[2][0]) <= 16


def test_questions_meet_every_topic_in_different_templates() -> None:
    asked = questions(["rice", "salt"], per_topic=3, seed=0)
    assert len(set(asked)) == 6
    assert sorted(topic_of(question) for question in asked) == ["rice"] * 3 + ["salt"] * 3


def test_walk_counts_a_step_once() -> None:
    right = torch.tensor([[0, 0, 1, 1, 0, 1, 0, 0], [0, 0, 1, 0, 1, 0, 0, 0]], dtype=torch.bool)
    # prompt of 3: newest known token 3 -> row 2: both right, then token 6 -> no room for two more drafts
    assert walk(right, 3, 7) == [2]
    assert walk(right, 4, 9) == [1, 1]  # rows 3 and 5: only the first each


@pytest.mark.parametrize("count", [1, 3])
def test_walked_acceptance_equals_real_steps(count: int) -> None:
    modules = toy_modules(count)
    rng = random.Random(1)
    prompts = [[rng.randrange(1, 300) for _ in range(n)] for n in (5, 9, 12)]
    walked = greedy_acceptance(modules, prompts, 40)
    stepped = stepwise_acceptance(modules, prompts, 40, 0.0)
    assert 0 < walked.per_position[0] < 1
    assert walked.steps == pytest.approx(stepped.steps, abs=3)  # ends differ by at most a step a prompt
    assert walked.per_position == pytest.approx(stepped.per_position, abs=3 / walked.steps)


def test_orthogonalised_singular_values_are_near_one() -> None:
    x = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(x))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_muon_treats_fused_matrices_as_their_parts() -> None:
    block = DecoderBlock(toy_config())
    block.reset_parameters(2, torch.Generator().manual_seed(0))
    rows = {id(p): r for p, r in block_matrices([block])}
    assert rows[id(block.qkv_weight)] == [32, 16, 16]
    before = block.gate_up_weight.detach().clone()
    muon = Muon([(block.gate_up_weight, [48, 48])], weight_decay=0.0)
    block.gate_up_weight.grad = torch.randn(96, 32, generator=torch.Generator().manual_seed(1))
    muon.step(0.1)
    change = (before - block.gate_up_weight.detach()).chunk(2)
    for part in change:
        assert torch.linalg.svdvals(part).max() < 1.3 * 0.1 * 0.2 * 48**0.5


def test_learning_rate_rises_stays_and_falls() -> None:
    assert learning_rate(1.0, 0, 0.0, 0.5) < 0.05
    assert learning_rate(1.0, 1000, 0.4, 0.5) == 1.0
    assert learning_rate(1.0, 1000, 1.0, 0.5) == pytest.approx(0.03)


def recorded(trunk: Transformer, count: int, length: int, seed: int) -> list[Recorded]:
    prompts = torch.randint(1, 300, (count, 6), generator=torch.Generator().manual_seed(seed))
    rows = generate(trunk, prompts, length, 0.0, torch.Generator()).tolist()
    hidden = record(trunk, rows)
    return [
        Recorded(torch.tensor(r, dtype=torch.int32), h, 6, 0.0) for r, h in zip(rows, hidden, strict=True)
    ]


def test_draft_vocabulary_is_sorted_and_of_response_tokens() -> None:
    r = Recorded(torch.tensor([9, 9, 5, 5, 7], dtype=torch.int32), torch.zeros(5, 4), 2, 0.0)
    counts = token_counts([r], 10)
    assert counts.tolist() == [0, 0, 0, 0, 0, 10, 0, 5, 0, 0]
    assert draft_vocabulary(counts, 3).tolist() == [0, 5, 7]


def test_batches_hold_every_sequence_once_an_epoch() -> None:
    trunk = toy_modules().trunk
    records = recorded(trunk, 7, 20, 0)
    seen = 0
    for batch in batches(lambda: records, Recipe(batch_tokens=60), torch.Generator().manual_seed(0)):
        seen += len(batch.ids)
        if seen >= 7:
            break
    assert seen == 7
    padded = pad(records, 0.25)
    assert padded.ids.shape[1] == 64
    assert padded.weight[0].tolist() == [0.25] * 5 + [1.0] * 20 + [0.0] * 39


def test_loss_rows_hold_the_batchs_own_tokens() -> None:
    modules = toy_modules(1)
    batch = pad(recorded(modules.trunk, 4, 20, 0), 0.1)
    counts = torch.zeros(300)
    some = Distillation(modules, 1, counts, Recipe(loss_rows=120))
    rows = some._rows(batch.ids)
    assert len(set(rows.tolist())) == 120
    assert torch.isin(torch.unique(batch.ids), rows).all()
    every = Distillation(modules, 1, counts, Recipe())
    assert 0 < some(batch).item() < every(batch).item()


def gradients(recipe: Recipe) -> list[float]:
    """Sum of absolute gradients of each of two chained modules."""
    modules = toy_modules(2)
    batch = pad(recorded(modules.trunk, 4, 20, 0), 0.1)
    parts = [modules.module(m) for m in range(2)]
    for part in parts:
        for parameter in part.parameters():
            parameter.requires_grad_(True)
    torch.autograd.backward(Distillation(modules, 2, torch.zeros(300), recipe)(batch))
    return [sum(float(p.grad.abs().sum()) for p in part.parameters() if p.grad is not None) for part in parts]


def test_a_cut_chain_sends_no_gradient_back() -> None:
    joined, cut = gradients(Recipe()), gradients(Recipe(cut_chain=True))
    assert cut[1] == pytest.approx(joined[1], rel=1e-4)
    assert cut[0] != pytest.approx(joined[0], rel=1e-3)


def test_the_first_module_may_stay_as_it_is() -> None:
    first, second = gradients(Recipe(keep_first=True))
    assert first == 0
    assert second > 0


def test_the_feature_loss_is_nothing_for_the_trunks_own_features() -> None:
    modules = toy_modules(1)
    batch = pad(recorded(modules.trunk, 4, 20, 0), 0.1)
    plain, weighed = (
        Distillation(modules, 1, torch.zeros(300), Recipe(feature_weight=w))(batch).item() for w in (0.0, 2.0)
    )
    assert weighed > plain
    assert feature_error(batch.hidden, batch.hidden).abs().max() == 0
    assert feature_error(torch.zeros_like(batch.hidden), batch.hidden).mean() == pytest.approx(1.0)


def test_a_run_lowers_the_loss_and_reports_agreement(tmp_path: Path) -> None:
    modules = toy_modules()
    trunk = modules.trunk
    for kind, count, seed in (("train", 24, 1), ("held", 6, 2)):
        rows = recorded(trunk, count, 26, seed)
        shard = {
            "ids": [r.ids for r in rows],
            "hidden": [r.hidden for r in rows],
            "prompt_length": [6] * count,
            "temperature": [0.0] * count,
        }
        torch.save(shard, tmp_path / f"{kind}_0000.pt")
    batch = pad(load_shards(tmp_path, "train"), 0.1)
    recipe = Recipe(num_modules=3, first_s=1.0, chained_s=2.0, batch_tokens=512)
    counts = token_counts(load_shards(tmp_path, "train"), 300)
    loss_of = Distillation(modules, 3, counts, recipe)
    loss = loss_of(batch).item()
    ModulesRun(modules, recipe, counts, tmp_path, tmp_path).run()
    assert loss_of(batch).item() < loss
    last = (tmp_path / "curve.csv").read_text().splitlines()[-1].split(",")
    measured = agreement(modules, load_shards(tmp_path, "held"))
    assert [float(rate) for rate in last[6:]] == pytest.approx(measured, abs=1e-4)
    assert json.loads((tmp_path / "modules" / "config.json").read_text())["num_modules"] == 3
    plot([str(tmp_path / "curve.csv"), str(tmp_path / "c.svg"), "--x", "tokens", "--y", "cumulative_0"])
    assert "polyline" in (tmp_path / "c.svg").read_text()


def test_trunk_run_resumes_and_exports(tmp_path: Path) -> None:
    documents = ["The server reads a request. It answers the request with a page. " * 60] * 4
    tokenizer = train_tokenizer(documents, vocab_size=300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = np.tile(token_stream(tokenizer, documents, 0.0), 20)
    for name in ("train", "val"):
        ids.tofile(tmp_path / f"{name}.bin")
    TrunkRun(tmp_path, tmp_path, 1.5, False, toy_config()).run()
    resumed = TrunkRun(tmp_path, tmp_path, 2.5, False, toy_config())
    first = resumed.progress.step
    resumed.run()
    assert resumed.progress.step > first > 0
    model = load_transformer(tmp_path / "model", "float32")
    assert model.config.layer_windows == (8, None)
    assert len(trunk_digest(tmp_path / "model")) == 64


def test_tiny_config_is_what_the_documentation_says() -> None:
    config = tiny_config()
    assert config.num_layers == 12
    assert config.layer_windows == (128, 128, 128, None) * 3
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (256, 4, 2, 64)


def test_prose_leaves_out_code_and_short_lines() -> None:
    sentence = "The server reads the request and answers it with a page that the client shows to its user. "
    body = f"Short.\n\n{sentence * 2}\n\n    x = {{1: [2, 3]}}; y = x[1] + 4 * (5 - 6) % 7\n"
    assert prose_of(body) == (sentence * 2).strip()


def test_chart_ticks_are_round() -> None:
    assert ticks(0.0, 1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(0, 1_000_000)[1] == 200_000
    assert chart({"a<b": [(0, 1), (2, 3)]}, "t", "x").count("a&lt;b") == 1
