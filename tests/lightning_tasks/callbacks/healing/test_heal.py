"""Heal: its losses are what they say, what trains in a stage trains, and a resumed run ends the same."""

import copy
import functools
import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div
from torch.utils.checkpoint import checkpoint

from attention_modules import SelfAttention, load_pretrained, restore_attention, swap_attention
from lightning_tasks.callbacks import (
    AttentionMonitor,
    DriftMonitor,
    Heal,
    LogitMonitor,
    QKClip,
    QKWeightDecay,
    SwapAttention,
)
from lightning_tasks.callbacks.init_from import InitFromCheckpoint, before_copies
from tests.lightning_tasks.callbacks.healing.healed import CLASSES, DIM, LAYERS, TOKENS, Classifier, Task, data, heal
from tests.lightning_tasks.callbacks.modules import TinyLM, TwoOptimizers, fit, weights_of
from tests.rows import each_row

THREE = [
    {"match": "layers", "steps": 3},
    {"match": "logits", "steps": 3, "temperature": 2.0, "lr_scale": 0.5},
    {"match": "task"},
]

QUIET = {
    "accelerator": "cpu",
    **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False),
}


@pytest.mark.parametrize("monitor", [AttentionMonitor, LogitMonitor])
def test_the_passes_of_a_drift_monitor_are_in_no_other(monitor):
    found = []
    for callbacks in ([monitor(1)], [DriftMonitor(), monitor(1)]):
        _, trainer = heal(callbacks)
        found.append({name: float(each) for name, each in trainer.callback_metrics.items() if "drift" not in name})
    assert found[0] == found[1]
    assert found[0]


def test_the_teacher_has_the_weights_that_a_run_starts_from(tmp_path):
    start = Task()
    for parameter in start.parameters():
        nn.init.normal_(parameter, std=0.2)
    torch.save({"state_dict": start.state_dict()}, tmp_path / "start.ckpt")
    monitor, load = DriftMonitor(), InitFromCheckpoint(str(tmp_path / "start.ckpt"))
    heal([load, monitor], max_steps=1)
    expected = start.net.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in monitor.teacher.network.state_dict().items())
    with pytest.raises(ValueError, match="list InitFromCheckpoint before DriftMonitor"):
        heal([monitor, InitFromCheckpoint(load.path)], max_steps=1)
    assert before_copies([monitor, load]) == [load, monitor]


def test_the_order_is_looked_at_in_a_validation_too(tmp_path):
    torch.save(Task().state_dict(), tmp_path / "start.ckpt")
    run = pl.Trainer(**QUIET, callbacks=[DriftMonitor(), InitFromCheckpoint(str(tmp_path / "start.ckpt"))])
    with pytest.raises(ValueError, match="list InitFromCheckpoint before DriftMonitor"):
        run.validate(Task(), data())


def test_an_error_within_a_step_leaves_the_rates_as_they_were():
    rates = []

    class Fails(Task):
        def training_step(self, batch, batch_idx):
            if self.trainer.training:
                rates.append(self.optimizers().param_groups[0]["lr"])
                raise MemoryError
            return super().training_step(batch, batch_idx)

    class Keeps(pl.Callback):
        def on_exception(self, trainer, pl_module, exception):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    with pytest.raises(MemoryError):
        heal([Heal([{"match": "task", "lr_scale": 10.0}]), Keeps()], module=Fails(0.05))
    assert rates == [0.5, 0.05]


class Gradients(pl.Callback):
    """Keeps the gradients of each optimizer step."""

    def __init__(self):
        self.steps = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        found = {name: one.grad for name, one in pl_module.named_parameters() if one.grad is not None}
        self.steps.append({name: grad.clone() for name, grad in found.items()})


def by_hand(match, x, labels, **stage):
    """Gradients of the loss of a stage, written down anew, in float64."""
    teacher = Task(dtype=torch.float64).net.eval()
    student = Task(dtype=torch.float64).net
    swap_attention(student, "symmetric")
    seen, losses = {}, []
    for name in LAYERS:
        keep = functools.partial(lambda name, module, args, kwargs, out: seen.update({name: (args[0], out[0])}), name)
        teacher.get_submodule(name).register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        wanted = teacher(x)
    given = student(x)
    if match == "layers":
        for name in LAYERS:
            given_layer = student.get_submodule(name)(*[seen[name][0]] * 3, need_weights=False)[0]
            error, size = ((part.square().sum((1, 2))) for part in (given_layer - seen[name][1], seen[name][1]))
            losses.append((error / size).mean())
        loss = torch.stack(losses).sum()
    elif match == "maps":
        for name in LAYERS:
            maps = []
            for network in (student, teacher):
                attention = network.get_submodule(name)
                projected = seen[name][0] @ attention.in_proj_weight.T + attention.in_proj_bias
                *q, k, _ = (x.unflatten(-1, (2, DIM // 2)).transpose(1, 2) for x in projected.split(DIM, -1))
                maps.append(((q[0] if q else k) @ k.mT * (DIM // 2) ** -0.5).softmax(-1))
            error, size = (part.square().sum((1, 2, 3)) for part in (maps[0] - maps[1].detach(), maps[1].detach()))
            losses.append((error / size).mean())
        loss = torch.stack(losses).sum()
    elif match == "output":
        loss = ((given - wanted).square().sum(1) / wanted.square().sum(1)).mean()
    else:
        t = stage["temperature"]
        log_p, log_q = (wanted / t).log_softmax(1), (given / t).log_softmax(1)
        loss = kl_div(log_q, log_p, reduction="batchmean", log_target=True) * t**2
    loss = loss + stage.get("task_weight", 0.0) * cross_entropy(given, labels)
    loss.backward()
    return loss, {f"net.{name}": one.grad for name, one in student.named_parameters() if one.grad is not None}


@pytest.mark.parametrize(
    "stage",
    [
        {"match": "maps"},
        {"match": "layers"},
        {"match": "output", "task_weight": 0.3},
        {"match": "logits", "temperature": 3.0},
    ],
    ids=lambda stage: stage["match"],
)
def test_the_loss_and_its_gradients_are_those_written_down(stage):
    gradients, module = Gradients(), Task(dtype=torch.float64)
    loader = data(1, dtype=torch.float64)
    loader_x, labels = loader.dataset.tensors
    trainer = fit(
        module, [SwapAttention("symmetric"), Heal([stage]), gradients], loader, max_steps=1, precision="64-true"
    )
    loss, wanted = by_hand(x=loader_x, labels=labels, **stage)
    assert trainer.callback_metrics["heal/loss"].item() == pytest.approx(loss.item(), rel=1e-6)  # logged in fp32
    (found,) = gradients.steps
    if stage["match"] in ("maps", "layers"):
        part = "self_attn.in_proj" if stage["match"] == "maps" else "self_attn"
        wanted = {name: grad for name, grad in wanted.items() if part in name}
    assert found.keys() == wanted.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-9, atol=1e-12)


def test_what_does_not_train_in_a_stage_stays_bitwise():
    before = Task().state_dict()
    module, _ = heal(Heal([{"match": "layers"}]))
    after = module.state_dict()
    rest = [name for name in before if "self_attn" not in name]
    assert rest
    assert all(torch.equal(before[name], after[name]) for name in rest)
    name = "net.encoder.layers.1.self_attn.out_proj.weight"
    assert not torch.equal(before[name], after[name])
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert "training_step" not in vars(module)


def test_new_parameters_alone():
    module, _ = heal(Heal([{"match": "layers", "train": "new"}]), "gated")
    changed = [name for name, one in Task().state_dict().items() if not torch.equal(one, module.state_dict()[name])]
    assert not changed
    with pytest.raises(ValueError, match="the mechanisms have no Parameters; give 'attention'"):
        heal(Heal([{"match": "layers", "train": "new"}]))


def test_it_heals():
    """Layers that are matched come nearer; those of a twin that is not trained do not."""
    monitor, callback = DriftMonitor(), Heal([{"match": "layers"}])
    first = heal(monitor, module=Task(lr=0.0), max_epochs=1)[1].callback_metrics
    last = heal(callback, module=Task(lr=0.05), max_epochs=40)[1].callback_metrics
    for name in ("val/drift/relative_error/layer_00", "val/drift/relative_error/layer_01", "val/drift/output_error"):
        assert last[name] < 0.8 * first[name]
    assert last["val/drift/cosine"] > first["val/drift/cosine"]


@pytest.mark.parametrize("mechanism", ["symmetric", "gated", "sink", "sigmoid", "qk_norm"])
def test_maps_that_are_matched_come_nearer(mechanism):
    monitor, callback = DriftMonitor(maps=True), Heal([{"match": "maps"}])
    first = heal(monitor, mechanism, module=Task(lr=0.0), max_epochs=1)[1].callback_metrics
    last = heal(callback, mechanism, module=Task(lr=0.05), max_epochs=20)[1].callback_metrics
    for line in ("layer_00", "layer_01", "mean"):
        assert 0 < last[f"val/drift/map_error/{line}"] < 0.9 * first[f"val/drift/map_error/{line}"]


def test_maps_without_a_gradient_are_refused():
    with pytest.raises(ValueError, match=r"the map of 'encoder.layers.0.self_attn' has no gradient.*match 'layers'"):
        heal(Heal([{"match": "maps"}]), "twicing")
    with pytest.raises(ValueError, match="they cannot be compared"):
        heal(Heal([{"match": "maps"}]), "differential", options={"pairs": "heads"})


def squashed(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).tanh()


@pytest.mark.parametrize("mechanism", [squashed, "differential"])
def test_drift_names_layers_without_a_map_and_goes_on(mechanism):
    options = {"pairs": "heads"} if mechanism == "differential" else {}
    with pytest.warns(UserWarning, match="DriftMonitor compares no map of 'encoder.layers.0.self_attn'"):
        _, trainer = heal(DriftMonitor(maps=True), mechanism, options=options, max_epochs=1)
    assert "val/drift/output_error" in trainer.callback_metrics
    assert not any("map_error" in name for name in trainer.callback_metrics)


def test_its_drift_is_that_of_a_copy_taken_apart():
    _, trainer = heal(DriftMonitor(logits=True), module=Task(lr=0.0), limit_val_batches=1)
    x = data().dataset.tensors[0][:4]
    teacher, student = Task().net.eval(), Task().net.eval()
    swap_attention(student, "symmetric")
    with torch.no_grad():
        wanted, given = teacher(x), student(x)
    logged = trainer.callback_metrics
    assert logged["val/drift/output_error"].item() == pytest.approx(((given - wanted).norm() / wanted.norm()).item())
    assert logged["val/drift/cosine"].item() == pytest.approx(cosine_similarity(given, wanted).mean().item())
    kl = kl_div(given.log_softmax(1), wanted.log_softmax(1), reduction="batchmean", log_target=True)
    assert logged["val/drift/kl"].item() == pytest.approx(kl.item(), rel=1e-4)
    assert logged["val/drift/relative_error/layer_00"] > 0.1


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_softmax_twin_has_no_drift(by_hand):
    module = Task()
    if by_hand:
        swap_attention(module.net, "softmax")
    stages = [{"match": "layers", "steps": 2}, {"match": "layers"}]
    _, trainer = heal(Heal(stages), None if by_hand else "softmax", module)
    assert trainer.callback_metrics["heal/loss"] < 1e-10
    assert trainer.callback_metrics["val/drift/relative_error/mean"] < 1e-5


def test_stages_follow_the_step_and_scale_the_rate():
    rates, stages = [], []

    class Rates(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            held = trainer.optimizers[0]

            def look(optimizer, *_):
                rates.append(optimizer.param_groups[0]["lr"])

            if not rates:
                held.register_step_post_hook(lambda *_: None)
                held.register_step_pre_hook(look)
            stages.append(trainer.callback_metrics.get("heal/stage"))

        def on_train_batch_end(self, trainer, *_):
            assert trainer.optimizers[0].param_groups[0]["lr"] == 0.05

    rater = Rates()
    module = Task()
    fit(module, [SwapAttention("symmetric"), Heal(THREE), rater], data(8), max_steps=8)
    assert rates == [0.05] * 2 + [0.025] * 3 + [0.05] * 2 or rates == [0.05] * 3 + [0.025] * 3 + [0.05] * 2


def test_the_loss_that_is_logged_is_that_of_the_stage_which_runs():
    losses = []

    class Losses(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses.append((trainer.logged_metrics["heal/loss"].item(), outputs["loss"].item()))

    heal([Heal([{"match": "layers", "steps": 2}, {"match": "task"}]), Losses()], log_every_n_steps=1)
    logged, taken = zip(*losses, strict=True)
    assert logged == taken
    assert len(logged) == 4


@pytest.mark.parametrize("stopped", [4, 8])
def test_a_resumed_run_ends_bitwise_identical(tmp_path, stopped):
    whole, _ = heal(Heal(THREE), "gated", max_epochs=3)
    _part, trainer = heal(Heal(THREE), "gated", max_epochs=stopped // 4)
    trainer.save_checkpoint(tmp_path / "part.ckpt")
    rest = Task()
    torch.manual_seed(1)
    again = pl.Trainer(callbacks=[SwapAttention("gated"), Heal(THREE)], max_epochs=3, **QUIET)
    again.fit(rest, data(), data(), ckpt_path=tmp_path / "part.ckpt")
    assert torch.equal(weights_of(whole), weights_of(rest))


def test_a_checkpoint_of_another_teacher_is_refused(tmp_path):
    _, trainer = heal(Heal(THREE), max_steps=2)
    trainer.save_checkpoint(tmp_path / "part.ckpt")
    other = Task()
    torch.nn.init.normal_(other.net.head.weight)
    again = pl.Trainer(callbacks=[SwapAttention("symmetric"), Heal(THREE)], max_steps=9, **QUIET)
    with pytest.raises(ValueError, match="beside another teacher"):
        again.fit(other, data(), ckpt_path=tmp_path / "part.ckpt")


@pytest.mark.parametrize("by_hand", [False, True])
def test_plain_weights_that_come_later_than_the_teacher_are_refused(by_hand, tmp_path):
    _, trainer = heal([], None, max_steps=2)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    for run in ("fit", "validate"):
        module = Task()
        if by_hand:
            swap_attention(module, "sink")
        watching = Heal(THREE) if run == "fit" else DriftMonitor()
        again = pl.Trainer(callbacks=[*([] if by_hand else [SwapAttention("l2")]), watching], max_steps=9, **QUIET)
        with pytest.raises(ValueError, match="which tells of no swap, come later: load them before the swap"):
            getattr(again, run)(module, data(), ckpt_path=tmp_path / "plain.ckpt")


@pytest.mark.parametrize("mechanism", ["sigmoid", "sink"])
def test_a_checkpoint_of_a_module_that_was_swapped_by_hand_is_told_of(mechanism, tmp_path):
    def swapped():
        module = Task()
        swap_attention(module, mechanism)
        return module

    fit(swapped(), [], data(), max_steps=2).save_checkpoint(tmp_path / "by_hand.ckpt")
    with pytest.warns(UserWarning, match="the teacher is the module as it is built now, before the checkpoint's"):
        pl.Trainer(callbacks=[DriftMonitor()], **QUIET).validate(swapped(), data(), ckpt_path=tmp_path / "by_hand.ckpt")


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_of_a_swap_without_a_teacher_is_told_of(weights_only, tmp_path):
    _, trainer = heal([], "l2", max_steps=2)
    trainer.save_checkpoint(tmp_path / "swapped.ckpt", weights_only)
    again = pl.Trainer(callbacks=[SwapAttention("l2"), DriftMonitor()], **QUIET)
    with pytest.warns(UserWarning, match="the teacher is the module as it is built now, before the checkpoint's"):
        again.validate(module := Task(), data(), ckpt_path=tmp_path / "swapped.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*the teacher is")
        again.validate(module, data(), ckpt_path=tmp_path / "swapped.ckpt")  # whose teacher is known


def test_watching_changes_nothing():
    plain, watched = Task(), Task()
    torch.manual_seed(1)
    fit(plain, [SwapAttention("dam", num_tokens=6)], data(), data(), max_epochs=2)
    torch.manual_seed(1)
    fit(watched, [SwapAttention("dam", num_tokens=6), DriftMonitor()], data(), data(), max_epochs=2)
    assert torch.equal(weights_of(plain), weights_of(watched))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_monitor_of_plain_layers_changes_neither_what_is_healed_nor_its_logs(place):
    def healed(*monitors):
        callbacks = [SwapAttention("gated", layers=[0]), Heal([{"match": "layers"}])]
        module, trainer = heal([*callbacks[:place], *monitors, *callbacks[place:]], None)
        logged = {name: value for name, value in trainer.callback_metrics.items() if "logit" not in name}
        return weights_of(module), logged

    weights, logged = healed()
    watched_weights, watched = healed(LogitMonitor(every_n_steps=1))
    assert torch.equal(weights, watched_weights)
    torch.testing.assert_close(watched, logged)  # the encoder's fused path, which it evaluates by, rounds otherwise


@pytest.mark.parametrize("place", [0, 1], ids=["before", "after"])
@pytest.mark.parametrize("make", [lambda: QKWeightDecay(1.0), lambda: QKClip(1e-5)], ids=["decay", "clip"])
def test_what_changes_weights_leaves_those_that_no_stage_trains_and_the_teacher(make, place):
    callback = Heal([{"match": "output", "train": "new"}])
    callbacks = [callback]
    callbacks.insert(place, make())
    module, _ = heal(callbacks, "gated")
    for network in (callback.teacher.network, module.net):
        held = network.encoder.layers[0].self_attn.in_proj_weight
        assert torch.equal(held, Task().net.encoder.layers[0].self_attn.in_proj_weight)


class Padded(Task):
    """Its encoder evaluates with nested tensors, as PyTorch's do by default; its last tokens are hidden."""

    def __init__(self, lr=0.05):
        super().__init__(lr)
        self.net.encoder.use_nested_tensor = True

    def forward(self, x):
        hidden = (torch.arange(x.shape[1]) >= x.shape[1] - 2).expand(x.shape[:2])
        return self.net.encoder(x, src_key_padding_mask=hidden)[:, :1].flatten(1)


@pytest.mark.parametrize("make", [DriftMonitor, functools.partial(Heal, THREE)])
def test_an_encoder_whose_tokens_are_padded(make):
    _, trainer = heal(make(network="net.encoder"), "softmax", Padded(lr=0.0), max_epochs=2)
    assert trainer.callback_metrics["val/drift/relative_error/mean"] < 1e-5
    assert trainer.callback_metrics["val/drift/output_error"] < 1e-5


class Scores(Classifier):
    def forward(self, x, hidden):
        return self.head(self.encoder(x, src_key_padding_mask=hidden))


class Tagger(Task):
    """Scores each token; where the last two are padding, its encoder hides them, and its loss leaves them out."""

    def __init__(self, padded):
        super().__init__(dtype=torch.float64)
        weights, self.padded = self.net.state_dict(), padded
        self.net = Scores().double()
        self.net.load_state_dict(weights)

    def training_step(self, batch, batch_idx):
        x = batch[0] if self.padded else batch[0][:, :-2]
        hidden = (torch.arange(x.shape[1]) >= TOKENS - 2).expand(x.shape[:2])
        return self.net(x, hidden)[:, : TOKENS - 2].square().mean()

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)


@pytest.mark.parametrize("match", ["maps", "layers", "output", "logits"])
def test_padding_heals_nothing(match):
    """The witness: the same tokens without padding."""
    train = "all" if match in ("output", "logits") else "attention"
    found = []
    for padded in (True, False):
        stages = [{"match": match, "train": train}]
        module, trainer = heal(Heal(stages, logits=True), module=Tagger(padded), precision="64-true", max_epochs=2)
        drift = {name: value for name, value in trainer.callback_metrics.items() if name.startswith(("heal/", "val/"))}
        found.append((weights_of(module), drift))
    (weights, drift), (wanted, other) = found
    assert {"val/drift/relative_error/mean", "val/drift/output_error", "val/drift/kl", "heal/loss"} <= drift.keys()
    torch.testing.assert_close(weights, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(drift, other, rtol=1e-6, atol=1e-9)


def test_a_second_fit_keeps_the_teacher():
    callback = Heal([{"match": "task"}])
    module, _ = heal(callback)
    digest = callback.teacher.digest
    fit(module, [callback], data(), data())
    assert callback.teacher.digest == digest
    plain = copy.deepcopy(module.net)
    restore_attention(plain)
    held = callback.teacher.network.encoder.layers[0].linear1.weight
    assert torch.equal(held, Task().net.encoder.layers[0].linear1.weight)
    assert not torch.equal(held, plain.encoder.layers[0].linear1.weight)


class Watching(pl.Callback):
    """Keeps what a look at the module says, before the first step and after the last."""

    def __init__(self, look):
        self.look, self.seen = look, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(self.look(pl_module))


def test_the_teacher_shares_what_no_stage_trains():
    callback = Heal([{"match": "layers"}])

    def shared(module):
        both = [callback.teacher.network, module.net]
        names = ("head.weight", "encoder.layers.0.self_attn.out_proj.weight")
        return [both[0].get_parameter(name) is both[1].get_parameter(name) for name in names]

    watching = Watching(shared)
    module, _ = heal([callback, watching])
    assert set(map(tuple, watching.seen)) == {(True, False)}
    assert shared(module) == [False, False]  # all trains from here on


class Unfreeze(pl.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            pl_module.net.requires_grad_(True)


@pytest.mark.parametrize("unfreeze", [Unfreeze(), None])
def test_what_is_unfrozen_later_does_not_train_the_teacher(unfreeze):
    class Frozen(Task):
        def __init__(self):
            super().__init__()
            self.net.head.requires_grad_(False)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    callback = Heal([{"match": "task"}])
    module, _ = heal([callback, *filter(None, [unfreeze])], module=Frozen(), max_epochs=2)
    if unfreeze is None:
        module.net.requires_grad_(True)
        fit(module, [callback], data(), data())
    held, head = callback.teacher.network.head.weight, Task().net.head.weight
    assert torch.equal(held, head)
    assert not torch.equal(module.net.head.weight, head)


def test_cross_attention_is_given_the_tokens_that_the_teacher_attended_to():
    class Decoder(Task):
        def __init__(self):
            super().__init__(lr=0.0)
            with torch.random.fork_rng():
                torch.manual_seed(4)
                self.net = nn.Transformer(DIM, 2, 1, 1, 8, dropout=0.0, batch_first=True)
                self.net.encoder.enable_nested_tensor = False

        def forward(self, x):
            return self.net(x, x).mean(1)[:, :CLASSES]

    module, cross = Decoder(), "decoder.layers.0.multihead_attn"
    teacher, taught = copy.deepcopy(module.net).eval(), []
    teacher.get_submodule(cross).register_forward_hook(lambda layer, given, out: taught.append((given, out[0])))
    swaps = [SwapAttention("symmetric", layers=[0]), SwapAttention("uniform", where=f"net.{cross}")]
    trainer = fit(module, [*swaps, DriftMonitor(network="net")], data(1), data(1))
    x = next(iter(data(1)))[0]
    with torch.no_grad():
        teacher(x, x)
        ((given, wanted),) = taught
        got = module.eval().net.get_submodule(cross)(*given, need_weights=False)[0]
    error = (got - wanted).norm() / wanted.norm()
    torch.testing.assert_close(trainer.callback_metrics[f"val/drift/relative_error/{cross}"], error)


def test_a_network_whose_tokens_come_first_heals_as_one_whose_samples_do():
    class TokensFirst(nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.inside = inside
            for layer in inside.encoder.layers:
                layer.self_attn.batch_first = False

        def forward(self, x):
            return self.inside.head(self.inside.encoder(x.transpose(0, 1)).mean(0))

    module = Task()
    module.net = TokensFirst(module.net)
    one, _ = heal(Heal([{"match": "layers"}]), max_epochs=2)
    other, _ = heal(Heal([{"match": "layers"}]), module=module, max_epochs=2)
    torch.testing.assert_close(weights_of(one), weights_of(other), rtol=1e-5, atol=1e-6)


def test_activation_checkpointing_gives_the_same():
    class Checkpointed(Task):
        def __init__(self):
            super().__init__()
            for layer in self.net.encoder.layers:
                forward = layer.forward
                layer.forward = functools.partial(checkpoint, forward, use_reentrant=False)

    for stages in (THREE, [{"match": "maps"}]):
        plain, _ = heal(Heal(stages), max_steps=8, max_epochs=3)
        saved, _ = heal(Heal(stages), module=Checkpointed(), max_steps=8, max_epochs=3)
        torch.testing.assert_close(weights_of(plain), weights_of(saved), rtol=1e-5, atol=1e-6)


def test_accumulated_gradients_and_clipping():
    for match in ("layers", "output", "logits"):
        options = {"max_epochs": 3, "gradient_clip_val": 0.1}
        whole, _ = heal(Heal([{"match": match}]), loader=data(1, 8), **options)
        parts, _ = heal(Heal([{"match": match}]), loader=data(2, 4), accumulate_grad_batches=2, **options)
        torch.testing.assert_close(weights_of(whole), weights_of(parts), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision(precision):
    module = Task()
    loader = data(dtype=torch.bfloat16 if precision == "bf16-true" else torch.float32)
    _, trainer = heal(Heal(THREE), module=module, loader=loader, max_steps=8, max_epochs=3, precision=precision)
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    assert torch.isfinite(trainer.callback_metrics["val/drift/output_error"])


class Elsewhere(Task):
    """Goes past the network's own forward."""

    def forward(self, x):
        return self.net.head(self.net.encoder(x).mean(1))


class Twice(Task):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + super().training_step(batch, batch_idx)


class Compiled(Task):
    def __init__(self):
        super().__init__()
        swap_attention(self.net, "sink")
        self.net = torch.compile(self.net)


class HeadAlone(Task):
    def configure_optimizers(self):
        return torch.optim.SGD(self.net.head.parameters(), 0.1)


class OwnBlocks(TinyLM):
    """Its own forward runs the layers, one by one."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([SelfAttention(DIM, 2) for _ in range(2)])

    def training_step(self, batch, batch_idx):
        return self.net[1](self.net[0](batch[0])).square().mean()


class TwoParts(OwnBlocks):
    def __init__(self):
        super().__init__()
        self.first, self.second = self.net
        del self.net


@each_row(
    ("make", "said"),
    [
        (lambda: heal(Heal(THREE), None), "no layer is swapped.*list SwapAttention before Heal"),
        (lambda: heal(Heal(THREE, network="model")), "network='model' is no part of Task; it has net"),
        (lambda: heal(Heal(THREE, network="net.head")), "'net.encoder.layers.0.self_attn' is outside"),
        (lambda: heal(Heal(THREE, network="")), "must be a part of the module"),
        (lambda: heal(Heal(THREE), module=OwnBlocks()), "no part of OwnBlocks that is called holds all swapped layers"),
        (lambda: heal(DriftMonitor(network="net"), module=OwnBlocks()), "put the network into a module of its own"),
        (lambda: heal(DriftMonitor(), module=TwoParts()), "no part of TwoParts .*\\(first, second\\)"),
        (lambda: heal(Heal(THREE), module=TinyLM()), "'net' is a ModuleDict, .* by network= \\('net.encoder'\\)"),
        (lambda: heal(Heal(THREE), module=Elsewhere()), "does not call 'net'.*network="),
        (lambda: heal(DriftMonitor(), module=Elsewhere()), "does not call 'net'.*network="),
        (lambda: heal(Heal(THREE), module=Twice()), "calls the network twice"),
        (lambda: heal(Heal(THREE, network="net.encoder"), module=TwoOptimizers()), "optimize automatically"),
        (lambda: heal(Heal(THREE), None, Compiled()), "compile it in place, net.compile\\(\\)"),
        (lambda: heal(Heal(THREE), module=HeadAlone()), "stage 0 trains .* and no optimizer holds any of them"),
        (lambda: heal(Heal([{"match": "task", "train": "head*"}])), "'head\\*' matches no Parameter"),
        (lambda: heal(Heal([{"match": "layers", "train": "net.head*"}])), "chooses 'net.head.bias', on which no layer"),
        (lambda: heal(Heal(THREE), strategy="ddp", devices=1), "ddp_find_unused_parameters_true"),
        (lambda: fit(Task(), [SwapAttention("sink"), Heal(THREE), DriftMonitor()]), "2 callbacks"),
        (lambda: fit(Task(), [Heal(THREE), SwapAttention("sink")], data(), data()), None),
        (lambda: fit(TinyLM(), [SwapAttention("sink"), Heal(THREE, network="net.encoder")]), None),
    ],
)
def test_refusals_and_what_is_allowed(make, said):
    if said is None:
        make()
    else:
        with pytest.raises((ValueError, TypeError), match=said):
            make()


def test_a_model_that_was_saved_and_loaded_heals_on(tmp_path):
    """Its folder holds the query rows, so that it has a teacher."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": DIM, "num_attention_heads": 2, "intermediate_size": DIM, "num_hidden_layers": 1}

    class Bert(TinyLM):
        def __init__(self, net):
            super().__init__(0.05)
            self.net = net

        def forward(self, x):
            return self.net(inputs_embeds=x).last_hidden_state

        def training_step(self, batch, batch_idx):
            return self(batch[0]).square().mean()

    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=10))
    before = copy.deepcopy(model).eval()
    swap_attention(model, "symmetric")
    with pytest.warns(UserWarning, match="load_pretrained"):
        model.save_pretrained(tmp_path)
    healing = Heal([{"match": "output"}])
    heal(healing, None, Bert(load_pretrained(transformers.BertModel, tmp_path)))
    x = torch.randn(1, TOKENS, DIM)
    torch.testing.assert_close(
        healing.teacher.network(inputs_embeds=x).last_hidden_state, before(inputs_embeds=x).last_hidden_state
    )
