"""Trains the trunk of `baton-tiny` from the token files of `train_corpus`.

    python -m scripts.train_trunk CORPUS OUT --minutes 50 [--compile]

Next-token prediction on random windows of the token stream, 2048 tokens a step: 256-token windows first,
512 from 72 % of the time on, 1024 from 92 % on. Runs until its wall-clock budget is used; stopped earlier,
it resumes. OUT/model is a checkpoint folder in the usual Hugging Face layout, with the tokenizer.
"""

import argparse
import csv
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from common.model.dense_attention import DenseAttention
from common.model.model_config import ModelConfig
from common.model.transformer import DecoderBlock, Transformer
from common.model.weights import save_checkpoint
from scripts.train_optim import Optimiser, block_matrices, learning_rate

BATCH_TOKENS = 2048
PEAK_LR = 4e-3
WEIGHT_DECAY = 0.05
CONSTANT = 0.45  # share of the run at the peak learning rate
LENGTHS = ((0.0, 256), (0.72, 512), (0.92, 1024))  # (from this progress on, window length)
COMPILED_LENGTHS = (256, 512)  # for the few steps of the last one, compiling costs more than it saves
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{{ '<|endoftext|>' if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def tiny_config() -> ModelConfig:
    """Qwen3 arithmetic at 12 layers of width 256; three sliding layers, then one full, three times."""
    return ModelConfig.from_json(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 4096,
            "hidden_size": 256,
            "num_hidden_layers": 12,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 512,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 128,
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 3,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "torch_dtype": "bfloat16",
        }
    )


def export(model: Transformer, tokenizer: Path, folder: Path) -> None:
    """The checkpoint folder: weights in bf16, configuration, tokenizer, chat template."""
    save_checkpoint(folder, model, "bfloat16")
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>"],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 4, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def read_tokens(path: Path) -> Tensor:
    """A uint16 token file as int64."""
    return torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int64))


def windows(stream: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` random pieces of length + 1 tokens: [count, length + 1]."""
    starts = torch.randint(len(stream) - length - 1, (count,), generator=generator)
    return torch.stack([stream[s : s + length + 1] for s in starts])


@dataclass
class Progress:
    """Where a run is; kept in its checkpoint."""

    step: int = 0
    tokens: int = 0
    used_s: float = 0.0


class Run:
    """The model, its optimiser and the curve."""

    def __init__(self, corpus: Path, out: Path, budget_s: float, compiled: bool, config: ModelConfig) -> None:
        self.out, self.budget_s, self.progress = out, budget_s, Progress()
        self.corpus = corpus
        self.train, self.held_out = read_tokens(corpus / "train.bin"), read_tokens(corpus / "val.bin")
        self.model = Transformer(config)
        self.model.reset_parameters(torch.Generator().manual_seed(0))
        self.attend = DenseAttention(config.layer_windows)
        blocks = [block for block in self.model.blocks if isinstance(block, DecoderBlock)]
        self.optimiser = Optimiser(block_matrices(blocks), self.model.parameters(), WEIGHT_DECAY)
        self.loss_of = torch.compile(self._loss) if compiled else self._loss
        self.state_path = out / "run.pt"
        if self.state_path.is_file():
            saved = torch.load(self.state_path)
            self.model.load_state_dict(saved["model"])
            self.optimiser.load_state_dict(saved["optimiser"])
            self.progress = Progress(**saved["progress"])

    def _loss(self, ids: Tensor) -> Tensor:
        hidden = self.model(ids[:, :-1], torch.arange(ids.shape[1] - 1), self.attend)
        return F.cross_entropy(self.model.logits(hidden).flatten(0, 1), ids[:, 1:].flatten())

    def run(self) -> None:
        """To the end of the budget; saves and measures every 150 s."""
        generator = torch.Generator().manual_seed(1 + self.progress.step)
        before, started = self.progress.used_s, time.monotonic()
        reported, average = started, 0.0
        with tqdm(total=round(self.budget_s), desc="trunk", unit="s", mininterval=30) as bar:
            bar.update(round(before))
            while self.progress.used_s < self.budget_s:
                done = self.progress.used_s / self.budget_s
                length = [length for begin, length in LENGTHS if done >= begin][-1]
                loss_of = self.loss_of if length in COMPILED_LENGTHS else self._loss
                loss = loss_of(windows(self.train, length, BATCH_TOKENS // length, generator))
                torch.autograd.backward(loss)
                self.optimiser.step(learning_rate(PEAK_LR, self.progress.step, done, CONSTANT))
                average = 0.95 * average + 0.05 * loss.item() if average else loss.item()
                self.progress.step += 1
                self.progress.tokens += BATCH_TOKENS
                now = time.monotonic()
                self.progress.used_s = before + now - started
                bar.update(round(self.progress.used_s) - bar.n)
                if now - reported > 150 or self.progress.used_s >= self.budget_s:
                    reported = now
                    self.save()
                    self.report(length, average)

    @torch.no_grad()
    def report(self, length: int, train_loss: float) -> None:
        """Appends loss and first-choice accuracy on held-out text to curve.csv."""
        ids = windows(self.held_out, 256, 64, torch.Generator().manual_seed(0))
        logits = torch.cat(
            [
                self.model.logits(self.model(part[:, :-1], torch.arange(256), self.attend))
                for part in torch.split(ids, 16)
            ]
        )
        held_out_loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
        top1 = (logits.argmax(-1) == ids[:, 1:]).float().mean().item()
        path, p = self.out / "curve.csv", self.progress
        new = not path.is_file()
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(
                    ["step", "tokens", "cpu_s", "wall_s", "length", "train_loss", "val_loss", "val_top1"]
                )
            cpu_s = round(time.process_time())
            figures = [round(train_loss, 4), round(held_out_loss, 4), round(top1, 4)]
            writer.writerow([p.step, p.tokens, cpu_s, round(p.used_s), length, *figures])

    def save(self) -> None:
        """A checkpoint to resume from, and the model folder."""
        state = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "progress": self.progress.__dict__,
        }
        torch.save(state, self.state_path.with_suffix(".tmp"))
        self.state_path.with_suffix(".tmp").replace(self.state_path)
        export(self.model, self.corpus / "tokenizer.json", self.out / "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path, help="folder that train_corpus wrote")
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=50.0)
    parser.add_argument("--compile", action="store_true", help="torch.compile; needs a C++ compiler")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    Run(args.corpus, args.out, 60 * args.minutes, args.compile, tiny_config()).run()


if __name__ == "__main__":
    main()
