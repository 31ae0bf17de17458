"""Small LightningModules that know nothing of this project, and their data."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, TOKENS, DIM, HEADS = 13, 6, 8, 2


def batches(count=5, batch_size=2, vocabulary=VOCABULARY):
    """A fixed loader of next-token batches."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(vocabulary, (count * batch_size, TOKENS + 1), generator=generator)
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=batch_size)


def network(num_layers=2):
    """A causal language model of PyTorch's own layers, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        # A deeper copy of one layer has equal weights in all of them: make them differ.
        for parameter in encoder.parameters():
            nn.init.normal_(parameter, std=0.3)
        parts = {"embed": nn.Embedding(VOCABULARY, DIM), "encoder": encoder, "head": nn.Linear(DIM, VOCABULARY)}
        return nn.ModuleDict(parts)


class TinyLM(pl.LightningModule):
    """Builds in ``__init__``."""

    def __init__(self, lr: float = 0.1, fused: bool = False):
        super().__init__()
        self.save_hyperparameters()
        self.net = network()

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.net["head"](self.net["encoder"](self.net["embed"](tokens), mask=mask))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, fused=self.hparams.fused)


class BuildsInSetup(TinyLM):
    """Builds in ``setup``."""

    def __init__(self, lr: float = 0.1, fused: bool = False):
        super().__init__(lr, fused)
        del self.net

    def setup(self, stage):
        if not hasattr(self, "net"):
            self.net = network()


class BuildsInConfigureModel(TinyLM):
    """Builds in ``configure_model``."""

    def __init__(self, lr: float = 0.1, fused: bool = False):
        super().__init__(lr, fused)
        del self.net

    def configure_model(self):
        if not hasattr(self, "net"):
            self.net = network()


class TwoOptimizers(TinyLM):
    """Manual optimization; one optimizer holds the first layer's attention, the other the second's."""

    def __init__(self, lr: float = 0.1, fused: bool = False):
        super().__init__(lr, fused)
        self.automatic_optimization = False

    def configure_optimizers(self):
        first = list(self.net["encoder"].layers[0].parameters())
        held = {id(parameter) for parameter in first}
        rest = [parameter for parameter in self.parameters() if id(parameter) not in held]
        return [torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.SGD(rest, lr=0.05)]

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def stepping(kind, when):
    """A module that takes the steps of some batches, and leaves out those of others after their backward pass."""

    class Steps(kind):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer_closure()
            if when(batch_idx):
                optimizer.step()

    return Steps


def keeping(kind, steps):
    """A module that gathers the gradients of so many batches itself, and takes a step behind them."""

    class Keeps(stepping(kind, lambda batch: (batch + 1) % steps == 0)):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            if batch_idx % steps == 0:
                optimizer.zero_grad()

    return Keeps


def fit(module, callbacks=(), loader=None, val_loader=None, ckpt_path=None, **trainer_options):
    """Train on the CPU with nothing printed or written; returns the trainer."""
    options = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(**{**options, **trainer_options}, callbacks=list(callbacks))
    trainer.fit(module, loader or batches(), val_loader, ckpt_path=ckpt_path)
    return trainer


def weights_of(module):
    """All parameters, one flat tensor."""
    return torch.cat([parameter.detach().flatten().float() for parameter in module.parameters()])


# Two of four prompts start with padding.
PROMPTS = torch.randint(1, 60, (4, TOKENS), generator=torch.Generator().manual_seed(7))
PROMPTS[0, :3] = PROMPTS[2, :1] = 0


def decoder(kind="Llama"):
    """A tiny causal model of transformers."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": 60, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, **ids, max_position_embeddings=32, initializer_range=0.3, use_cache=True
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def shown(tokens):
    """What a model is called with for all of these tokens at once; 0 before the first is padding."""
    mask = (tokens.cumsum(-1) > 0).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, "use_cache": False}


class Generates(pl.LightningModule):
    """Continues prompts in validation, with a key-value cache."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def validation_step(self, batch, batch_idx):
        mask = (batch != 0).long()
        self.tokens = self.model.generate(batch, attention_mask=mask, max_new_tokens=4, do_sample=False)


class InTwoCalls(Generates):
    """Reads its prompts in two calls with one key-value cache, in validation and in training."""

    def validation_step(self, batch, batch_idx):
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.config)
        given = {**shown(batch), "use_cache": True, "past_key_values": self.cache}
        loss = torch.zeros(())
        for of in (slice(0, 4), slice(4, TOKENS)):
            part = {"input_ids": batch[:, of], "position_ids": given["position_ids"][:, of]}
            part["attention_mask"] = given["attention_mask"][:, : of.stop]
            loss = loss + self.model(**{**given, **part}).logits.mean()
        return loss

    training_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
