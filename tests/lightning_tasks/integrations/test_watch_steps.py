"""What becomes of penalties and clips when a loop scales, clips, drops, accumulates or repeats its gradients."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import attnswap
from attention_modules.analysis import frobenius_squared
from attention_modules.hosts import attention_layers
from lightning_tasks.callbacks import AttentionMonitor, EntropyRegularizer, LocAteR, QKClip

WEIGHT = 0.05


def network():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(4, 16), layer, nn.Linear(16, 3))


def inputs(count=5):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, 4, generator=generator) for _ in range(count)]


def penalty(model):
    """LocAteR's, by its equation."""
    return WEIGHT * sum(frobenius_squared(*layer.qk_weights()).sum() for layer in attention_layers(model))


def flat(model):
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def scaled_steps(model, loss_of, fused=False, unscales=False, overflows=0, zeroes=True):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    yield {"optimizer": optimizer, "scaler": scaler}
    for place, batch in enumerate(inputs()):
        scaler.scale(loss_of(batch) * (float("inf") if place < overflows else 1.0)).backward()
        if unscales:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=zeroes)


def windows(model, loss_of, given_up=(), clips=False):
    """Of two batches, the last of one; some are given up after their first batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield {"optimizer": optimizer, "accumulate": 2}
    gathered = 0
    for place, batch in enumerate(inputs(6 if given_up else 5)):
        (loss_of(batch) / 2).backward()
        gathered = 0 if place in given_up else gathered + 1
        if not gathered:
            optimizer.zero_grad()
        if gathered == 2 or place == 4:
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            gathered = 0


def discriminator(model, loss_of):
    """Real and generated batches have a backward pass each, and the generator's goes through the model."""
    torch.manual_seed(3)
    generator = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield {"optimizer": optimizer, "accumulate": 2}
    for batch in inputs():
        model.zero_grad()
        (loss_of(batch) / 2).backward()
        (loss_of(generator(batch).detach()) / 2).backward()
        optimizer.step()
        model(generator(batch)).square().mean().backward()


LOOPS = {
    "scaled": scaled_steps,
    "scaled, fused": lambda *of: scaled_steps(*of, fused=True),
    "unscaled and clipped": lambda *of: scaled_steps(*of, unscales=True),
    "unscaled and clipped, fused": lambda *of: scaled_steps(*of, fused=True, unscales=True),
    "first steps left out": lambda *of: scaled_steps(*of, overflows=2),
    "first steps left out, zeroed in place": lambda *of: scaled_steps(*of, overflows=2, zeroes=False),
    "short last window, clipped": lambda *of: windows(*of, clips=True),
    "a window given up": lambda *of: windows(*of, given_up=(0,)),
    "real and generated": discriminator,
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_penalty_enters_as_if_the_loss_had_it(name):
    found = []
    for watched in (True, False):
        model = network()

        def loss_of(batch, model=model, watched=watched):
            loss = model(batch).square().mean()
            return loss if watched else loss + penalty(model)

        loop = LOOPS[name](model, loss_of)
        given = next(loop)
        with attnswap.watch(model, log=dict, callbacks=[LocAteR(WEIGHT)], **given) if watched else nullcontext():
            assert next(loop, None) is None
        found.append(flat(model))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[0], flat(network()))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("place", ["before", "between", "behind"])
def test_logits_of_a_step_that_the_loop_leaves_out_clip_no_later_one(place, in_place):
    """Wherever it zeroes the gradients: before the forward pass, before the backward pass, or behind the step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attnswap.watch(model, log=dict, callbacks=[QKClip(tau=30.0)], optimizer=optimizer):
        for factor in (100, 1, 1):
            if place == "before":
                optimizer.zero_grad(set_to_none=not in_place)
            loss = model(inputs()[0] * factor).square().mean()
            if place == "between":
                optimizer.zero_grad(set_to_none=not in_place)
            loss.backward()
            if factor == 1:
                optimizer.step()
            if place == "behind":
                optimizer.zero_grad(set_to_none=not in_place)
    assert torch.equal(flat(model), flat(network()))


@pytest.mark.parametrize(("skipped", "tau", "clips"), [(100.0, 30.0, False), (float("nan"), 0.05, True)])
@pytest.mark.parametrize("callbacks", [[], [LocAteR(0.0)]])
def test_a_batch_that_is_skipped_before_its_backward_pass_is_as_none(skipped, tau, clips, callbacks):
    """Nor does a penalty beside change which batches count."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attnswap.watch(model, log=dict, callbacks=[QKClip(tau=tau), *callbacks], optimizer=optimizer):
        for factor in (skipped, 1.0):
            loss = (model(inputs()[0] * factor) * factor).square().mean()
            if loss < 5:  # neither a spike nor NaN
                loss.backward()
                optimizer.step()
    assert (not torch.equal(flat(model), flat(network()))) == clips
    assert flat(model).isfinite().all()


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("behind", [False, True])
def test_calls_without_gradients_are_in_no_step(reentrant, behind):
    """As of mining or of a figure; those of a checkpoint come again with gradients, and count."""
    found = []
    for look, factor in ((True, 1), (False, 1), (False, 100)):
        model = network()
        if reentrant is not None:
            model[1].forward = partial(checkpoint, model[1].forward, use_reentrant=reentrant)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with attnswap.watch(model, log=dict, callbacks=[QKClip(tau=30.0)], optimizer=optimizer):
            for place in (0, 1):
                if place == 1:
                    loss = model(inputs()[0] * factor).square().mean()
                if look and place == behind:
                    with torch.no_grad():
                        model(inputs()[0] * 100)
            loss.backward()
            optimizer.step()
        found.append(flat(model))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], flat(network()))
    assert not torch.equal(found[2], flat(network()))


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_all_calls_of_a_layer_count_wherever_they_are_computed(reentrant):
    found = []
    for factors in ((40, 1), (1, 40), (40,)):
        model = network()
        if reentrant is not None:
            model[1].forward = partial(checkpoint, model[1].forward, use_reentrant=reentrant)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with attnswap.watch(model, log=dict, callbacks=[QKClip(tau=0.5)], optimizer=optimizer):
            sum(model(inputs()[0] * factor).square().mean() for factor in factors).backward()
            optimizer.step()
        found.append(flat(model))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])


@pytest.mark.parametrize("callbacks", [[], [LocAteR(0.0)]])
def test_logits_of_a_gradient_that_the_loop_takes_of_the_same_step_count(callbacks):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attnswap.watch(model, log=dict, callbacks=[QKClip(tau=30.0), *callbacks], optimizer=optimizer):
        far = (inputs()[0] * 100).requires_grad_()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # which has second derivatives
            (gradient,) = torch.autograd.grad(model(far).square().mean(), far, create_graph=True)
        (model(inputs()[0]).square().mean() + gradient.square().mean()).backward()
        optimizer.step()
    assert not torch.equal(flat(model), flat(network()))


@pytest.mark.parametrize("named", [False, True])
def test_logits_of_a_step_that_is_left_out_clip_no_later_one(named):
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    given = {"scaler": scaler} if named else {}
    with attnswap.watch(model, log=dict, callbacks=[QKClip(tau=30.0)], optimizer=optimizer, **given):
        for batch, factor in zip(inputs(2), (float("inf"), 1.0), strict=True):
            large = batch * (100 if factor > 1 else 1)
            scaler.scale(model(large).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert torch.equal(flat(model), flat(network()))


@pytest.mark.parametrize("named", [False, True])
def test_the_logits_of_one_optimizer_s_left_out_step_are_forgotten_though_another_stepped(named):
    model = network()
    weights = [*model[1].parameters()]
    optimizers = [torch.optim.SGD(part, lr=0.0) for part in (weights, [*model[0].parameters(), *model[2].parameters()])]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    given = {"scaler": scaler} if named else {}
    with attnswap.watch(model, log=dict, callbacks=[QKClip(tau=30.0)], optimizer=optimizers, **given):
        for factor in (100.0, 1.0):
            scaler.scale(model(inputs()[0] * factor).square().mean()).backward()
            if factor > 1:
                weights[0].grad.fill_(float("inf"))
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert torch.equal(flat(model), flat(network()))


def test_a_clip_sees_accumulated_batches_that_nobody_named():
    found = []
    for given in ({}, {"accumulate": 2}):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with attnswap.watch(model, log=dict, callbacks=[QKClip(tau=30.0)], optimizer=optimizer, **given):
            for batch, factor in zip(inputs(2), (100, 1), strict=True):
                model(batch * factor).square().mean().backward()
            optimizer.step()
        found.append(flat(model))
    assert torch.equal(*found)
    assert not torch.equal(found[0], flat(network()))


class Around(torch.optim.Optimizer):
    """Steps by another optimizer, as that of sharpness-aware minimization does."""

    def __init__(self, params):
        super().__init__(params, {})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)

    def second_step(self):
        self.base_optimizer.step()

    def step(self, closure=None):
        self.second_step()


def test_a_step_by_an_optimizer_inside_the_named_one_is_told_of_and_a_step_through_it_is_one(recwarn):
    for through in (True, False):
        model, seen = network(), []
        optimizer = Around(model.parameters())
        step = optimizer.step if through else optimizer.second_step
        log = lambda _, step, seen=seen: seen.append(step)  # noqa: E731
        with attnswap.watch(model, log=log, callbacks=[AttentionMonitor(1)], optimizer=optimizer):
            for batch in inputs(3):
                model(batch).square().mean().backward()
                step()
                optimizer.zero_grad()
        told = [
            str(each.message) for each in recwarn if "SGD steps what Around, given as optimizer=" in str(each.message)
        ]
        assert (seen, len(told)) == (([0, 1, 2], 0) if through else ([0], 1))


def test_a_step_after_a_backward_pass_that_ran_out_of_memory_is_one():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise MemoryError

    model, seen = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = lambda _, step: seen.append(step)  # noqa: E731
    with attnswap.watch(model, log=log, callbacks=[LocAteR(WEIGHT)], optimizer=optimizer, accumulate=2):
        whole, failing = inputs(2)
        model(whole).square().mean().backward()
        with pytest.raises(MemoryError):
            model(Fails.apply(failing.requires_grad_())).square().mean().backward()
        optimizer.step()
    assert seen == [0]


def test_a_step_within_the_backward_pass_is_refused():
    model = network()
    by_parameter = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}
    for parameter in by_parameter:
        parameter.register_post_accumulate_grad_hook(lambda each: by_parameter[each].step())
    watching = attnswap.watch(model, log=dict, callbacks=[LocAteR(WEIGHT)], optimizer=[*by_parameter.values()])
    with pytest.raises(ValueError, match="a step within the backward pass"), watching:
        model(inputs()[0]).square().mean().backward()


def test_a_step_within_the_backward_pass_is_refused_where_a_clip_changes_what_it_reads():
    """Keys have their gradient, and step, before the gradient of the queries' input is taken."""
    config = LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model, tokens = LlamaForCausalLM(config), torch.arange(16).view(2, 8)
    by_parameter = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}
    for parameter in by_parameter:
        parameter.register_post_accumulate_grad_hook(lambda each: by_parameter[each].step())
    watching = attnswap.watch(model, log=dict, callbacks=[QKClip(tau=100.0)], optimizer=[*by_parameter.values()])
    with (
        pytest.warns(UserWarning, match="lie in several optimizers"),
        pytest.raises(ValueError, match="would clip what that pass still reads"),
        watching,
    ):
        model(input_ids=tokens, labels=tokens).loss.backward()


class Tasks(nn.Module):
    """Two heads on one trunk."""

    def __init__(self):
        super().__init__()
        self.trunk = network()
        torch.manual_seed(1)
        self.heads = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

    def forward(self, batch, task):
        return self.heads[task](self.trunk(batch))


def test_a_penalty_enters_once_where_two_optimizers_hold_a_parameter():
    found = []
    for watched in (True, False):
        model = Tasks()
        optimizers = [torch.optim.SGD([*model.trunk.parameters(), *head.parameters()], lr=0.1) for head in model.heads]
        watching = attnswap.watch(model, log=dict, callbacks=[LocAteR(WEIGHT)], optimizer=optimizers)
        with watching if watched else nullcontext():
            for place, batch in enumerate(inputs(4)):
                optimizer = optimizers[place % 2]
                optimizer.zero_grad()
                loss = model(batch, place % 2).square().mean()
                (loss if watched else loss + penalty(model)).backward()
                optimizer.step()
        found.append(flat(model))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zeroes_all", [False, True])
def test_two_networks_of_one_model_are_trained_in_turn(zeroes_all):
    """Of one forward pass, as an actor and a critic: a backward pass and a step each."""
    found = []
    for watched in (True, False):
        model = nn.ModuleList([network(), network()])
        model.forward = lambda batch, model=model: [part(batch) for part in model]
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
        watching = attnswap.watch(model, log=dict, callbacks=[LocAteR(WEIGHT)], optimizer=optimizers)
        with watching if watched else nullcontext():
            for batch in inputs():
                outputs = model(batch)
                for part, output, optimizer in zip(model, outputs, optimizers, strict=True):
                    (model if zeroes_all else optimizer).zero_grad()
                    loss = output.square().mean()
                    (loss if watched else loss + penalty(part)).backward()
                    optimizer.step()
        found.append(flat(model))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("callback", [LocAteR, EntropyRegularizer])
def test_two_losses_of_one_forward_pass_have_a_share_of_the_penalty_each(callback):
    found = []
    for parts in (1, 2):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        given = {"callbacks": [callback(WEIGHT)], "optimizer": optimizer, "accumulate": parts}
        with attnswap.watch(model, log=dict, **given):
            output = model(inputs()[0])
            losses = [output.square().mean() / 2, output.abs().mean() / 2]
            for loss in [sum(losses)] if parts == 1 else losses:
                loss.backward(retain_graph=True)
            optimizer.step()
        found.append(flat(model))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


class WithTemperature(nn.Module):
    """Returns one of its Parameters beside its output."""

    def __init__(self):
        super().__init__()
        self.network, self.temperature = network(), nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return self.network(batch) * self.temperature, self.temperature


def test_what_outlives_a_forward_pass_is_given_no_hooks():
    model = WithTemperature()
    with attnswap.watch(model, log=dict):
        for batch in inputs():
            model(batch)[0].square().mean().backward()
    assert not model.temperature._backward_hooks


def test_a_loop_that_an_error_ended_begins_again():
    model, seen = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = attnswap.watch(
        model, log=lambda _, step: seen.append(step), callbacks=[LocAteR(WEIGHT)], optimizer=optimizer
    )
    for error in (RuntimeError("out of memory"), None):
        with pytest.raises(RuntimeError, match="out of memory") if error else nullcontext(), watching:
            for batch in inputs(2):
                model(batch).square().mean().backward()
                if error:
                    raise error
                optimizer.step()
                optimizer.zero_grad()
    assert seen == [0, 1]


def test_a_state_holds_where_a_mean_began():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attnswap.watch(model, log=dict, callbacks=[LocAteR(WEIGHT, gamma=1.0)], optimizer=optimizer) as loop:
        state = loop.callback_states()
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(2)
    compiled = torch.compile(model)  # whose layers have other names
    again = attnswap.watch(compiled, log=dict, callbacks=[LocAteR(WEIGHT, gamma=1.0)], optimizer=optimizer)
    again.load_state_dict(state)
    with again:
        (before,), (after,) = (
            next(iter(each.values()))["initial_traces"].values() for each in (state, again.callback_states())
        )
    assert torch.equal(before, after)


def test_a_state_within_the_block_comes_too_late():
    model = network()
    with attnswap.watch(model, log=dict) as loop, pytest.raises(RuntimeError, match="comes before the block"):
        loop.load_state_dict({"step": 500})


def test_a_resumed_loop_goes_on_where_it_was():
    """Its steps are counted on, and what is looked at every few steps is looked at then."""
    found = []
    for parts in ([inputs(10)], [inputs(10)[:6], inputs(10)[6:]]):
        model, state, seen = network(), None, []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for part in parts:
            callbacks = [QKClip(tau=0.3, every_n_steps=4)]
            loop = attnswap.watch(
                model, log=lambda _, step, seen=seen: seen.append(step), callbacks=callbacks, optimizer=optimizer
            )
            if state is not None:
                loop.load_state_dict(state)
            with loop:
                for batch in part:
                    optimizer.zero_grad()
                    model(batch * 3).square().mean().backward()
                    optimizer.step()
                state = loop.state_dict()
        found.append(flat(model))
        assert seen == [*range(10)]
    assert torch.equal(*found)


def test_sparse_gradients_are_no_hindrance():
    torch.manual_seed(0)
    model, seen = nn.Sequential(nn.Embedding(5, 16, sparse=True), network()[1]), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = lambda _, step: seen.append(step)  # noqa: E731
    with attnswap.watch(model, log=log, callbacks=[LocAteR(WEIGHT)], optimizer=optimizer):
        for place in range(3):
            model(torch.arange(4).view(1, 4)).square().mean().backward()
            if place:  # the first step is left out
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert len(seen) == 3


def test_two_layers_whose_names_differ_by_a_wrapper_begin_each_at_its_own_mean():
    torch.manual_seed(0)
    model = nn.ModuleDict({"0": network()[1], "module": nn.ModuleDict({"0": nn.TransformerEncoderLayer(16, 2, 32)})})
    optimizer, penalty = torch.optim.SGD(model.parameters(), lr=0.1), LocAteR(WEIGHT, gamma=1.0)
    with attnswap.watch(model, log=dict, callbacks=[penalty], optimizer=optimizer) as loop:
        first, second = next(iter(loop.callback_states().values()))["initial_traces"].values()
    assert not torch.equal(first, second)


def test_a_start_that_failed_takes_a_state_again():
    class Fails(AttentionMonitor):
        def on_fit_start(self, *given):
            raise MemoryError

    loop = attnswap.watch(network(), log=dict, callbacks=[Fails()])
    with pytest.raises(MemoryError):
        loop.__enter__()
    loop.load_state_dict({"step": 3})
