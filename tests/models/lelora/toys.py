"""Small models with adapters, for the tests of LeLoRA."""

import torch
from torch import nn

from models.lelora.adapter import KINDS, Adapter
from models.lelora.inject import adapters_of, find_targets, inject, refresh
from models.lelora.row_steps import RowSteps
from models.lelora.spectrum import decompose
from models.lelora.switch import switch


def llama(layers=2, tied=False, vocab=40, **config):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
             "initializer_range": 0.1}  # fmt: skip
    return LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=layers, vocab_size=vocab, tie_word_embeddings=tied,
                    bos_token_id=0, eos_token_id=1, **(sizes | config))
    )  # fmt: skip


class Adapted:
    """A model with adapters and AdamW over what trains, on one process."""

    def __init__(self, model, kind, rows=8, fold_rows=32, targets=("all-linear",), lr=1e-2,
                 betas=(0.9, 0.999)):  # fmt: skip
        self.model, self.kind = model, kind
        self.targets = find_targets(model, targets, [])
        inject(model, self.targets, kind, rows, fold_rows)
        self.adapters = adapters_of(model, self.targets)
        for adapter in self.adapters.values():
            adapter.reset_parameters()
        self.atoms = {t.name: decompose(t.oriented(model.get_submodule(t.name).weight),
                                        range(t.shape.components)) for t in self.targets}  # fmt: skip
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=lr, betas=betas, weight_decay=0.0)
        self.row_steps = RowSteps(self.optimizer, self.adapters.values())

    def switch(self, name, components, scale=1.0, tolerance=1e-3):
        adapter = self.adapters[name]
        moments = {n: self.optimizer.state[getattr(adapter, n)] for n in adapter.trained}
        done = switch(self.kind, whole(adapter), moments, components, scale,
                      self.atoms[name].pick, tolerance)  # fmt: skip
        refresh(adapter, self.row_steps.horizon)
        return done

    def switch_all(self, components, scale=1.0):
        return [self.switch(t.name, [c for c in components if c < t.shape.components], scale)
                for t in self.targets]  # fmt: skip

    def train(self, steps, tokens, closure=None):
        for _ in range(steps):
            loss = self.model(input_ids=tokens, labels=tokens).loss
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return float(loss.detach())

    def logits(self, tokens):
        with torch.no_grad():
            return self.model(input_ids=tokens).logits


def whole(adapter):
    return {name: tensor.data for name, tensor in
            (*adapter.named_parameters(), *adapter.named_buffers())}  # fmt: skip


def tokens(batch=4, length=12, vocab=40):
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(1))


class Single(nn.Module):
    """One adapter beside a matrix, trained towards another matrix."""

    def __init__(self, kind, m=12, n=10, rows=4, fold_rows=16, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(m, n, generator=generator)
        self.goal = self.weight + 0.3 * torch.randn(m, n, generator=generator)
        self.adapter = Adapter(kind, m, n, rows, fold_rows)
        self.adapter.reset_parameters()
        self.atoms = decompose(self.weight, range(min(m, n)))
        self.optimizer = torch.optim.AdamW(self.adapter.parameters(), lr=1e-2, weight_decay=0.0,
                                           betas=(0.9, 0.999))  # fmt: skip
        self.row_steps = RowSteps(self.optimizer, [self.adapter])

    def update(self):
        return self.adapter(torch.eye(self.weight.shape[1])).T

    def switch(self, components, scale=1.0, **more):
        moments = {n: self.optimizer.state[getattr(self.adapter, n)] for n in self.adapter.trained}
        done = switch(self.adapter.kind, whole(self.adapter), moments, components, scale,
                      self.atoms.pick, **more)  # fmt: skip
        refresh(self.adapter, self.row_steps.horizon)
        return done

    def train(self, steps):
        for _ in range(steps):
            loss = (self.weight + self.update() - self.goal).square().sum()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return float(loss.detach())


ALL_KINDS = list(KINDS)
