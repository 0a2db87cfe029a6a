"""The default model as prepared from its package: the same bytes everywhere, and it says what it said when
recorded.
"""

import json
from pathlib import Path

import pytest
import torch

from common.model.dense_attention import DenseAttention
from common.model.registry import DEFAULT_MODEL, resolve_model
from common.model.weights import load_transformer, trunk_digest
from common.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

DIGEST = "4ce8881dd4ad539497a33fcab43b3444ca07ae1e93417e20cf6753f5e3daeda2"


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(DEFAULT_MODEL, progress=False).folder


def test_conversion_gives_the_digest_its_modules_were_made_for(folder: Path) -> None:
    assert trunk_digest(folder) == DIGEST


def test_answers_recorded_elsewhere_are_its_own(folder: Path, shared_dir: Path) -> None:
    """Greedy answers that another implementation recorded in bf16: nearly all are our fp32 argmax."""
    model, tokenizer = load_transformer(folder, "float32"), Tokenizer.from_folder(folder)
    lines = (shared_dir / "training" / "responses" / "smollm2_135m_instruct.jsonl").read_text().splitlines()
    greedy = [row for row in map(json.loads, lines[:40]) if row["temperature"] == 0][:3]
    for row in greedy:
        ids = torch.tensor([row["prompt"] + row["response"]])
        attend = DenseAttention(model.config.layer_windows)
        with torch.inference_mode():
            logits = model.logits(
                model(ids, torch.arange(ids.shape[1]), attend)[0, len(row["prompt"]) - 1 : -1]
            )
        assert (logits.argmax(-1) == torch.tensor(row["response"])).float().mean() > 0.95
        text = tokenizer.decode(row["prompt"], skip_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == row["prompt"]
        question = text.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        assert tokenizer.apply_chat_template([{"role": "user", "content": question}]) == text
