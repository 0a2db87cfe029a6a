"""Distils N MTP modules for any trunk, which stays frozen: first module 0 alone, then all N chained.

    python -m scripts.train_modules TRUNK DATA OUT [options]

DATA is a folder of `train_features` shards (recorded sequences with the trunk's hidden states). Module m at
position p reads module m-1's output at p and token p+m+1, as at run time, and learns the trunk's
distribution for token p+m+2: soft cross-entropy + 0.5 x cross-entropy to the trunk's first choice, both
over the draft vocabulary, and, with `--feature-weight`, the trunk's normed hidden state itself, which says
more about a token than its probabilities do. Runs until its wall-clock budget is used; stopped earlier, it
resumes.
"""

import argparse
import csv
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from common.model.mtp import MtpModules
from common.model.mtp_config import MtpConfig
from common.model.weights import load_mtp, load_transformer, save_mtp, trunk_digest
from kernels.rms_norm import rms_norm
from scripts.train_eval import agreement, attention_for
from scripts.train_features import Recorded, load_shards
from scripts.train_optim import Optimiser, block_matrices, learning_rate

HARD_WEIGHT = 0.5
DECAY = 0.8  # of the loss weight from one module to the next
POOL = 128  # sequences among which batches of similar length are formed
CONSTANT = 0.3  # share of a stage at the peak learning rate
WARMUP_STEPS = 6
EMBED_SHARE = 0.1  # of the embedding in a module's input at the start
SOFTNESS = 0.4  # scale of the first module norm: the copied block is sure of the wrong position


@dataclass(frozen=True)
class Recipe:
    """What a run is made of; written into the modules' config.json."""

    num_modules: int = 4
    draft_vocab_size: int | None = None  # None = the whole vocabulary
    loss_rows: int | None = None  # head rows in the loss of one batch, drawn by frequency; None = all
    draft_head: bool = False  # a head of the modules' own, started from the trunk's rows
    first_s: float = 600.0  # wall seconds for module 0 alone
    chained_s: float = 600.0  # wall seconds for all modules
    first_lr: float = 5e-3
    chained_lr: float = 3e-3
    adamw_scale: float = 0.3  # AdamW's rate (norms, own head) relative to Muon's
    batch_tokens: int = 2048
    prompt_weight: float = 0.1  # of the loss at positions that predict prompt tokens
    weight_decay: float = 0.02
    dropout: float = 0.0  # of the hidden states a module reads; against learning a small corpus by heart
    feature_weight: float = 0.0  # of the squared error to the trunk's normed hidden state one position on
    cut_chain: bool = False  # no gradient from a module into the ones before it
    keep_first: bool = False  # the chained stage leaves module 0 as it is
    compile: bool = False  # torch.compile; needs a C++ compiler, about 1.6 times as fast
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    """ids [B, T], the trunk's hidden states [B, T, D], weight [B, T] of each hidden state as a target."""

    ids: Tensor
    hidden: Tensor
    weight: Tensor


def token_counts(records: list[Recorded], vocab_size: int) -> Tensor:
    """How often each id occurs in the responses [V]; greedy text counts five times."""
    counts = torch.zeros(vocab_size)
    for r in records:
        tokens = r.ids[r.prompt_length :].long()
        counts.index_add_(0, tokens, torch.full((len(tokens),), 5.0 if r.temperature == 0 else 1.0))
    return counts


def draft_vocabulary(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent ids, ascending; among those never seen, low ids (early BPE merges) first."""
    by_count = torch.argsort(counts, descending=True, stable=True)
    return by_count[:size].sort().values


def batches(
    load: Callable[[], list[Recorded]], recipe: Recipe, generator: torch.Generator
) -> Iterator[Batch]:
    """Endless shuffled epochs, sequences of similar length together; each epoch asks `load` again."""
    while True:
        records = load()
        order = torch.randperm(len(records), generator=generator).tolist()
        for at in range(0, len(order), POOL):
            pool = sorted(order[at : at + POOL], key=lambda i: len(records[i].ids))
            groups: list[list[int]] = [[]]
            for i in pool:
                if groups[-1] and (len(groups[-1]) + 1) * len(records[i].ids) > recipe.batch_tokens:
                    groups.append([])
                groups[-1].append(i)
            for group in torch.randperm(len(groups), generator=generator).tolist():
                yield pad([records[i] for i in groups[group]], recipe.prompt_weight)


def pad(records: list[Recorded], prompt_weight: float, multiple: int = 64) -> Batch:
    """Sequences side by side; lengths are rounded up so that few shapes have to be compiled."""
    longest = max(len(r.ids) for r in records)
    length = -(-longest // multiple) * multiple
    ids = torch.zeros(len(records), length, dtype=torch.long)
    hidden = torch.zeros(len(records), length, records[0].hidden.shape[1])
    weight = torch.zeros(len(records), length)
    for row, r in enumerate(records):
        n = len(r.ids)
        ids[row, :n], hidden[row, :n] = r.ids.long(), r.hidden.float()
        weight[row, : r.prompt_length - 1] = prompt_weight
        weight[row, r.prompt_length - 1 : n - 1] = 1.0
    return Batch(ids, hidden, weight)


def feature_error(normed: Tensor, feature: Tensor) -> Tensor:
    """Squared error [B, T] of normed states [B, T, D], in units of the mean square of the wanted ones."""
    return (normed - feature).square().mean(-1) / feature.square().mean()


class Distillation:
    """The loss of the first `active` modules; compiled, each module's part is one graph.

    With `loss_rows` the softmax of a batch runs over that many head rows: those of the batch's own tokens
    and others drawn without replacement in proportion to their counts + 1.
    """

    def __init__(self, modules: MtpModules, active: int, counts: Tensor, recipe: Recipe) -> None:
        self.modules, self.active = modules, active
        self.attend = attention_for(modules)
        vocab = modules.draft_vocab if modules.draft_vocab is not None else torch.arange(len(counts))
        self.weights = counts[vocab] + 1.0  # [Vd]
        self.index_of = torch.full((len(counts),), -1).index_copy_(0, vocab, torch.arange(len(vocab)))
        self.vocab, self.recipe, compiled = vocab, recipe, recipe.compile
        self.module_loss = torch.compile(self._module_loss, dynamic=True) if compiled else self._module_loss

    def __call__(self, batch: Batch) -> Tensor:
        """Mean over positions and, with weights 1, 0.8, 0.64, ..., over modules."""
        length = batch.ids.shape[1] - self.active  # positions at which every active module has its token
        positions = torch.arange(length)
        rows = self._rows(batch.ids)
        trunk = self.modules.trunk
        features = rms_norm(batch.hidden, trunk.final_norm, trunk.config.rms_norm_eps)
        wanted = self._targets(features, trunk.head_weight[self.vocab[rows]])
        head = self.modules.draft_head_weight[rows]
        state, total, weights = batch.hidden[:, :length], torch.zeros(()), 0.0
        for m in range(self.active):
            window = slice(m + 1, m + 1 + length)
            following, want, weight = batch.ids[:, window], wanted[:, window], batch.weight[:, window]
            if m == 0 and self.recipe.keep_first and self.active > 1:
                with torch.no_grad():
                    state = self.modules.forward_module(m, state, following, positions, self.attend)
                continue
            state = state.detach() if self.recipe.cut_chain else state
            state, loss = self.module_loss(
                m, state, following, positions, head, want, features[:, window], weight
            )
            total, weights = total + DECAY**m * loss, weights + DECAY**m
        return total / weights

    def _rows(self, ids: Tensor) -> Tensor:
        """Indices into the draft vocabulary [R], ascending."""
        if self.recipe.loss_rows is None or self.recipe.loss_rows >= len(self.vocab):
            return torch.arange(len(self.vocab))
        weights = self.weights.clone()
        present = self.index_of[torch.unique(ids)]
        weights[present[present >= 0]] = 1e9
        return torch.multinomial(weights, self.recipe.loss_rows).sort().values

    def _targets(self, features: Tensor, head: Tensor) -> Tensor:
        """The trunk's distribution over the rows plus HARD_WEIGHT on its first choice: [B, T, R]."""
        with torch.no_grad():
            logits = F.linear(features, head)
            best = logits.argmax(-1, keepdim=True)
            return logits.softmax(-1).scatter_add_(-1, best, torch.full_like(logits[..., :1], HARD_WEIGHT))

    def _module_loss(
        self,
        m: int,
        state: Tensor,
        following: Tensor,
        positions: Tensor,
        head: Tensor,
        want: Tensor,
        feature: Tensor,
        weight: Tensor,
    ) -> tuple[Tensor, Tensor]:
        recipe = self.recipe
        state = F.dropout(state, recipe.dropout) if recipe.dropout else state
        state = self.modules.forward_module(m, state, following, positions, self.attend)
        normed = rms_norm(state, self.modules.module(m).norm, self.modules.trunk.config.rms_norm_eps)
        logits = F.linear(normed, head)
        loss = (1 + HARD_WEIGHT) * logits.logsumexp(-1) - (want * logits).sum(-1)
        if recipe.feature_weight:
            loss = loss + recipe.feature_weight * feature_error(normed, feature)
        return state, (loss * weight).sum() / weight.sum()


@torch.no_grad()
def initialise(modules: MtpModules, records: list[Recorded]) -> None:
    """Every module starts as the trunk's last block over a residual stream of unit size.

    The trunk's own stream is far larger (a root mean square of about 30 for SmolLM2), so the block's outputs
    are divided by it: the final norm makes that the same function, at a size where Muon's steps count.
    """
    modules.init_from_trunk()
    sizes = torch.cat([r.hidden.float().square().mean(-1).sqrt() for r in records[:50]])
    eye = torch.eye(modules.trunk.config.hidden_size)
    for m in range(modules.num_modules):
        module = modules.module(m)
        module.hidden_norm.fill_(1.0)
        module.proj.copy_(torch.cat((eye, EMBED_SHARE * eye), 1))
        module.block.o_weight.div_(sizes.median())
        module.block.down_weight.div_(sizes.median())
        module.norm.mul_(SOFTNESS)


class Run:
    """One resumable training run; what it measures goes to curve.csv."""

    def __init__(self, modules: MtpModules, recipe: Recipe, counts: Tensor, data: Path, out: Path) -> None:
        self.modules, self.recipe, self.counts, self.data, self.out = modules, recipe, counts, data, out
        self.held_out = [r for r in load_shards(data, "held") if r.temperature == 0][:24]
        self.stage, self.step, self.tokens, self.used_s = 0, 0, 0, 0.0
        self.state_path = out / "run.pt"

    def optimiser(self, active: int) -> Optimiser:
        """For the `active` first modules and the own head."""
        first = 1 if self.recipe.keep_first and active > 1 else 0
        parts = [self.modules.module(m) for m in range(first, active)]
        matrices = list(block_matrices(part.block for part in parts))
        matrices += [(part.proj, [part.proj.shape[0]]) for part in parts]
        parameters = [p for part in parts for p in part.parameters()]
        if self.modules.draft_head is not None:
            parameters.append(self.modules.draft_head)
        for parameter in parameters:
            parameter.requires_grad_(True)
        return Optimiser(matrices, parameters, self.recipe.weight_decay)

    def run(self, copy_first: bool = True) -> None:
        """Both stages, from where an earlier run stopped; between them module 0 is copied to the others."""
        saved = torch.load(self.state_path) if self.state_path.is_file() else None
        if saved is not None:
            self.modules.load_state_dict(saved["modules"])
            self.stage, self.step = saved["stage"], saved["step"]
            self.tokens, self.used_s = saved["tokens"], saved["used_s"]
        budgets = (self.recipe.first_s, self.recipe.chained_s)
        for stage in range(self.stage, 2):
            self.stage = stage
            active = 1 if self.stage == 0 else self.modules.num_modules
            optimiser = self.optimiser(active)
            if saved is not None:
                optimiser.load_state_dict(saved["optimiser"])
                saved = None
            peak = self.recipe.first_lr if self.stage == 0 else self.recipe.chained_lr
            self._train(active, optimiser, budgets[self.stage], peak)
            if self.stage == 0:
                self.step, self.used_s = 0, 0.0
                for m in range(1, self.modules.num_modules if copy_first else 0):
                    self.modules.module(m).load_state_dict(self.modules.module(0).state_dict())

    def _train(self, active: int, optimiser: Optimiser, budget_s: float, peak: float) -> None:
        loss_of = Distillation(self.modules, active, self.counts, self.recipe)
        generator = torch.Generator().manual_seed(self.recipe.seed + self.step)
        source = batches(lambda: load_shards(self.data, "train"), self.recipe, generator)
        before, started = self.used_s, time.monotonic()
        reported = started
        with tqdm(total=round(budget_s), desc=f"modules 0..{active - 1}", unit="s", mininterval=30) as bar:
            bar.update(round(before))
            while self.used_s < budget_s:
                batch = next(source)
                loss = loss_of(batch)
                torch.autograd.backward(loss)
                lr = learning_rate(peak, self.step, self.used_s / budget_s, CONSTANT, WARMUP_STEPS)
                optimiser.step(lr, self.recipe.adamw_scale)
                self.step, self.tokens = self.step + 1, self.tokens + batch.ids.numel()
                now = time.monotonic()
                self.used_s = before + now - started
                bar.update(round(self.used_s) - bar.n)
                if now - reported > 240 or self.used_s >= budget_s:
                    reported = now
                    self.save(optimiser)
                    self.report(loss.item())

    def report(self, loss: float) -> None:
        """Appends the held-out cumulative rate of each position to curve.csv."""
        rates = agreement(self.modules, self.held_out)
        path = self.out / "curve.csv"
        new = not path.is_file()
        row = [
            self.stage,
            self.step,
            self.tokens,
            round(self.used_s),
            round(time.process_time()),
            round(loss, 4),
        ]
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                names = [f"cumulative_{m}" for m in range(len(rates))]
                writer.writerow(["stage", "step", "tokens", "stage_wall_s", "cpu_s", "loss", *names])
            writer.writerow(row + [round(rate, 4) for rate in rates])

    def save(self, optimiser: Optimiser) -> None:
        """A checkpoint to resume from, and the modules in their final format."""
        state = {
            "modules": self.modules.state_dict(),
            "optimiser": optimiser.state_dict(),
            "stage": self.stage,
        }
        state |= {"step": self.step, "tokens": self.tokens, "used_s": self.used_s}
        torch.save(state, self.state_path.with_suffix(".tmp"))
        self.state_path.with_suffix(".tmp").replace(self.state_path)
        save_mtp(self.out / "modules", self.modules)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trunk", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--start", type=Path, help="modules folder of an earlier run to go on from")
    parser.add_argument("--keep-chain", action="store_true", help="of --start keep modules 1.. too")
    for name, value in asdict(Recipe()).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(value) if value is not None else int, default=value)
    args = vars(parser.parse_args())
    folder, data, out = args.pop("trunk"), args.pop("data"), args.pop("out")
    start: Path | None = args.pop("start")
    keep_chain: bool = args.pop("keep_chain")
    recipe = Recipe(**args)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(recipe.seed)
    trunk = load_transformer(folder, "float32")
    kept = out / "counts.pt"  # a resumed run keeps its vocabulary, whatever shards came since
    if not kept.is_file():
        torch.save(token_counts(load_shards(data, "train"), trunk.config.vocab_size), kept)
    counts = torch.load(kept)
    size = recipe.draft_vocab_size
    vocab = None if size is None else draft_vocabulary(counts, size)
    config = MtpConfig(
        num_modules=recipe.num_modules,
        trunk_digest=trunk_digest(folder),
        draft_vocab_size=recipe.draft_vocab_size,
        draft_head=recipe.draft_head,
        recipe=asdict(recipe),
    )
    modules = MtpModules(config, trunk, vocab)
    if start is None:
        initialise(modules, load_shards(data, "train"))
    else:
        earlier = load_mtp(start, trunk, "float32", config.trunk_digest)
        modules.modules_list.load_state_dict(earlier.modules_list.state_dict())
    Run(modules, recipe, counts, data, out).run(copy_first=not keep_chain)


if __name__ == "__main__":
    main()
