"""Swapping in modules that build at different moments, beside other callbacks, and back from a checkpoint."""

import copy
import itertools
import pickle
import warnings
from collections import Counter
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch.nn.utils import parametrize

from attention_modules import restore_attention, swap_attention
from attention_modules.mechanism import AttentionMechanism
from attention_modules.mechanisms.softmax import SoftmaxAttention
from lightning_tasks.callbacks import (
    AttentionMonitor,
    FreezeQK,
    LipschitzMonitor,
    LocAteR,
    PursuitMonitor,
    QKWeightDecay,
    SpectrumMonitor,
    SwapAttention,
)
from lightning_tasks.callbacks.init_from import InitFromCheckpoint
from lightning_tasks.files.load import load_swapped
from tests.lightning_tasks.callbacks.modules import (
    BuildsInConfigureModel,
    BuildsInSetup,
    TinyLM,
    batches,
    fit,
    weights_of,
)
from tests.rows import each_row

KINDS = [TinyLM, BuildsInSetup, BuildsInConfigureModel]


class TemperedSoftmax(SoftmaxAttention):
    """Has an option and a parameter, so that a lost mechanism shows."""

    def __init__(self, spec, temperature=1.0):
        super().__init__(spec)
        self.log_temperature = torch.nn.Parameter(torch.tensor(float(temperature)).log())

    def forward(self, q, k, v, **options):
        return super().forward(q * torch.exp(-self.log_temperature), k, v, **options)


PATH = f"{__name__}.TemperedSoftmax"


def mechanisms(module):
    return [found for found in module.modules() if isinstance(found, AttentionMechanism)]


@each_row(
    ("mechanism", "options", "text"),
    [("rpc", {"iterations": 0}, "iterations"), ("rpc", {"lam": -1.0}, "lam"), ("scaled", {"variant": "x"}, "variant")],
)
def test_an_option_out_of_its_limits_is_refused_when_the_callback_is_made(mechanism, options, text):
    state = torch.get_rng_state()
    SwapAttention("scaled", {"num_tokens": 8})
    with pytest.raises(ValueError, match=text):
        SwapAttention(mechanism, options)
    assert torch.equal(torch.get_rng_state(), state)


@each_row(
    ("layers", "build"),
    itertools.product(
        ["x", 1.5, [0, "1"], [True]],
        [
            partial(SwapAttention, "rpc"),
            partial(LocAteR, 1.0),
            partial(QKWeightDecay, 0.1),
            AttentionMonitor,
            FreezeQK,
            LipschitzMonitor,
            PursuitMonitor,
            SpectrumMonitor,
        ],
    ),
)
def test_layers_are_integers(build, layers):
    with pytest.raises(ValueError, match="layers must be a list of integers"):
        build(layers=layers)
    build(layers=[0, -1])


@pytest.mark.parametrize("kind", KINDS)
def test_swaps_after_the_network_is_built_and_before_the_optimizer(kind):
    module = kind()
    swap = SwapAttention("symmetric")
    trainer = fit(module, [swap])
    assert [type(found).__name__ for found in mechanisms(module)] == ["SymmetricAttention"] * 2
    assert [row.name for row in swap.report] == [f"net.encoder.layers.{index}.self_attn" for index in range(2)]
    held = {id(parameter) for parameter in trainer.optimizers[0].param_groups[0]["params"]}
    assert held == {id(parameter) for parameter in module.parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_fit_then_test_swaps_once(kind):
    module = kind()
    first = SwapAttention(TemperedSoftmax, {"temperature": 2.0})
    trainer = fit(module, [first], max_steps=1)
    trained = [id(found) for found in mechanisms(module)]
    assert mechanisms(module)[0].log_temperature.item() != pytest.approx(torch.tensor(2.0).log().item())
    parametrize.register_parametrization(mechanisms(module)[0], "log_temperature", torch.nn.Identity())  # another class
    trainer.test(module, batches(1), verbose=False)
    trainer.validate(module, batches(1), verbose=False)
    other = pl.Trainer(accelerator="cpu", logger=False, callbacks=[SwapAttention(PATH, {"temperature": 2.0})])
    other.test(module, batches(1), verbose=False)  # another trainer, another callback, the same plan
    assert [id(found) for found in mechanisms(module)] == trained


class Holding(pl.Callback):
    """Has a swap of its own, as a project's callback may."""

    def setup(self, trainer, pl_module, stage):
        SwapAttention("rpc").setup(trainer, pl_module, stage)


def test_what_acts_is_what_was_asked_last():
    """Also where a module had the same swap before another one."""
    module = TinyLM()
    for asked in (2, 8, 2):
        fit(module, [SwapAttention("rpc", iterations=asked)])
        assert {each.iterations for each in mechanisms(module)} == {asked}
    swap_attention(module, "rpc", iterations=8)
    fit(module, [SwapAttention("rpc", iterations=2)])
    assert {each.iterations for each in mechanisms(module)} == {2}


def test_a_swap_that_another_callback_holds_is_made_beside_others():
    """It is not among the trainer's callbacks, and the monitor's preparation must not end it."""
    module = BuildsInConfigureModel()
    fit(module, [Holding(), AttentionMonitor()], max_steps=1)
    assert {type(found).__name__ for found in mechanisms(module)} == {"RPCAttention"}


def test_the_module_is_left_without_our_hook():
    module = TinyLM()
    fit(module, [SwapAttention("softmax"), AttentionMonitor()], max_steps=1)
    assert "configure_model" not in vars(module)
    pickle.loads(pickle.dumps(module))


def test_softmax_for_softmax_trains_the_same():
    swapped, plain = TinyLM(), TinyLM()
    fit(swapped, [SwapAttention("softmax")])
    fit(plain)
    torch.testing.assert_close(weights_of(swapped), weights_of(plain), atol=1e-6, rtol=1e-5)


def test_a_configured_module_can_be_copied_while_it_is_hooked():
    class Copies(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            self.copy = copy.deepcopy(pl_module)

    copies = Copies()
    fit(TinyLM(), [SwapAttention("softmax"), copies], max_steps=1)
    hook = vars(copies.copy)["configure_model"]
    assert hook.args[0] is copies.copy


# WeightAveraging copies a module before its setup has run, so it has no use for one that builds there.
@pytest.mark.parametrize("kind", [TinyLM, BuildsInConfigureModel])
@pytest.mark.parametrize("averaging", [WeightAveraging, EMAWeightAveraging])
def test_weight_averaging_listed_after_averages_the_swapped_module(kind, averaging):
    module = kind()
    fit(module, [SwapAttention("symmetric"), averaging()])
    assert len(mechanisms(module)) == 2
    assert weights_of(module).isfinite().all()


@each_row(
    "taking",
    [
        *(WeightAveraging, EMAWeightAveraging, lambda: StochasticWeightAveraging(0.1)),
        lambda: ModelPruning("l1_unstructured", amount=0.3),
    ],
)
def test_what_takes_the_module_before_the_swap_is_an_error(taking):
    module = TinyLM()
    with pytest.raises(ValueError, match="list SwapAttention before"):
        fit(module, [taking(), SwapAttention("symmetric")])
    assert mechanisms(module) == []


def test_stochastic_weight_averaging():
    module = TinyLM()
    fit(module, [SwapAttention("symmetric"), StochasticWeightAveraging(0.1, swa_epoch_start=1)], max_epochs=3)
    assert len(mechanisms(module)) == 2
    with pytest.raises(ValueError, match="EMAWeightAveraging"):
        fit(BuildsInConfigureModel(), [SwapAttention("symmetric"), StochasticWeightAveraging(0.1)])


@pytest.mark.parametrize("kind", [TinyLM, BuildsInConfigureModel])
def test_load_swapped_rebuilds_from_the_checkpoint(kind, tmp_path):
    module = kind()
    callbacks = [SwapAttention("symmetric", layers=[1]), SwapAttention(PATH, {"temperature": 3.0}, layers=[0])]
    trainer = fit(module, callbacks, max_steps=2)
    trainer.save_checkpoint(tmp_path / "swapped.ckpt")
    loaded = load_swapped(kind, tmp_path / "swapped.ckpt")
    assert type(loaded) is kind
    assert [type(found).__name__ for found in mechanisms(loaded)] == ["TemperedSoftmax", "SymmetricAttention"]
    tokens = next(iter(batches()))[0]
    assert torch.equal(loaded.eval()(tokens), module.eval()(tokens))
    trained = [id(found) for found in mechanisms(loaded)]
    again = [SwapAttention("symmetric", layers=[1]), SwapAttention(PATH, {"temperature": 3.0}, layers=[0])]
    fit(loaded, again, max_steps=1)
    assert [id(found) for found in mechanisms(loaded)] == trained


@pytest.mark.parametrize("averaging", [None, WeightAveraging, EMAWeightAveraging])
@pytest.mark.parametrize("mechanism", ["twicing", "gated", "symmetric", "softmax"])
def test_a_plain_module_does_not_take_what_a_mechanism_learned(mechanism, averaging, tmp_path):
    module = TinyLM()
    averages = [averaging()] if averaging else []
    fit(module, [SwapAttention(mechanism), *averages], max_epochs=1).save_checkpoint(tmp_path / "swapped.ckpt")
    tester = pl.Trainer(accelerator="cpu", logger=False)
    tokens = next(iter(batches()))[0]
    if mechanism == "softmax":
        torch.testing.assert_close(
            TinyLM.load_from_checkpoint(tmp_path / "swapped.ckpt").eval()(tokens), module.eval()(tokens)
        )
        return
    for load in (
        lambda: TinyLM.load_from_checkpoint(tmp_path / "swapped.ckpt"),
        lambda: tester.test(TinyLM(), batches(1), ckpt_path=tmp_path / "swapped.ckpt", verbose=False),
    ):
        with pytest.raises(RuntimeError, match=r"layers\.0\S+(mechanism|in_proj_weight|qkv)"):
            load()
    loaded = load_swapped(TinyLM, tmp_path / "swapped.ckpt")
    assert torch.equal(loaded.eval()(tokens), module.eval()(tokens))
    resumed(tmp_path / "swapped.ckpt", SwapAttention(mechanism), *averages)


def test_a_checkpoint_of_weights_alone_tells_of_no_swap(tmp_path):
    weights = pl.callbacks.ModelCheckpoint(tmp_path, save_weights_only=True)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, callbacks=[SwapAttention("twicing"), weights])
    module = TinyLM()
    with pytest.warns(UserWarning, match="save_weights_only=True keeps no plan of a swap"):
        trainer.fit(module, batches())
    with pytest.raises(ValueError, match=r"weights alone .*give TinyLM.* with the same SwapAttention"):
        load_swapped(TinyLM, weights.best_model_path)
    with pytest.raises(RuntimeError, match=r"layers\.0\S+mechanism\.saved_by_attnswap_load_with_load_swapped"):
        TinyLM.load_from_checkpoint(weights.best_model_path)
    cure, loaded = pl.Trainer(accelerator="cpu", logger=False, callbacks=[SwapAttention("twicing")]), TinyLM()
    cure.test(loaded, batches(1), ckpt_path=weights.best_model_path, verbose=False)
    tokens = next(iter(batches()))[0]
    assert torch.equal(loaded.eval()(tokens), module.eval()(tokens))


def test_load_swapped_refuses_a_network_that_setup_builds_and_says_what_works(tmp_path):
    module = BuildsInSetup()
    path = tmp_path / "swapped.ckpt"
    fit(module, [SwapAttention("symmetric")], max_steps=2).save_checkpoint(path)
    with pytest.raises(ValueError, match=r"BuildsInSetup .*'net\.encoder.* in setup\(\).*trainer\.test\(BuildsInSetup"):
        load_swapped(BuildsInSetup, path)
    loaded = BuildsInSetup()
    tester = pl.Trainer(accelerator="cpu", logger=False, callbacks=[SwapAttention("symmetric")])
    tester.test(loaded, batches(1), ckpt_path=path, verbose=False)
    assert torch.equal(weights_of(loaded), weights_of(module))


@pytest.mark.parametrize("then", [None, "entmax", "gated"])
def test_a_checkpoint_holds_what_acts_and_not_what_was_swapped_before(tmp_path, then):
    module, path = TinyLM(), tmp_path / "later.ckpt"
    run = fit(module, [SwapAttention("sigmoid")])
    restore_attention(module) if then is None else swap_attention(module, then)
    run.save_checkpoint(path)
    tokens = next(iter(batches()))[0]
    loaded = TinyLM.load_from_checkpoint(path) if then is None else load_swapped(TinyLM, path)
    assert torch.equal(loaded.eval()(tokens), module.eval()(tokens))
    if then == "entmax":  # and another in a part of the layers
        swap_attention(module.net["encoder"].layers[0], "sink", start=-1.0)
        run.save_checkpoint(path)
        loaded = load_swapped(TinyLM, path)
        assert torch.equal(loaded.eval()(tokens), module(tokens))


def test_load_swapped_without_a_swap(tmp_path):
    fit(TinyLM(), max_steps=1).save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match=r"plain.ckpt holds no swap.*TinyLM.load_from_checkpoint"):
        load_swapped(TinyLM, tmp_path / "plain.ckpt")


def resumed(path, *callbacks):
    module = TinyLM()
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2,
        callbacks=[*callbacks],
    )
    trainer.fit(module, batches(), ckpt_path=path)
    return module


def test_resume_continues_the_swapped_run(tmp_path):
    straight = TinyLM()
    fit(straight, [SwapAttention("symmetric")], max_epochs=2)
    fit(TinyLM(), [SwapAttention("symmetric")], max_epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    assert torch.equal(weights_of(resumed(tmp_path / "one.ckpt", SwapAttention("symmetric"))), weights_of(straight))


@each_row(("mechanism", "key"), [("rpc", "in_proj_weight"), (PATH, "log_temperature")])
def test_resuming_a_plain_run_under_other_parameters_is_refused(tmp_path, mechanism, key):
    fit(TinyLM()).save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match=rf"not as they were: .*{key}.*--init_from"):
        resumed(tmp_path / "plain.ckpt", SwapAttention(mechanism))
    # What the text advises works: testing needs no optimizer, and the weights alone load.
    tester = pl.Trainer(accelerator="cpu", logger=False, callbacks=[SwapAttention(mechanism)])
    tester.test(TinyLM(), batches(1), ckpt_path=tmp_path / "plain.ckpt", verbose=False)
    fit(TinyLM(), [SwapAttention(mechanism), InitFromCheckpoint(str(tmp_path / "plain.ckpt"))])


def test_resuming_without_the_frozen_weights_and_with_extra_state(tmp_path):
    class Slim(TinyLM):
        strict_loading = False

        def __init__(self):
            super().__init__()
            self.net.encoder.layers[0].self_attn.in_proj_weight.requires_grad_(False)
            self.net.get_extra_state = lambda: {"seen": 3}
            self.net.set_extra_state = lambda state: None

        def on_save_checkpoint(self, checkpoint):
            del checkpoint["state_dict"]["net.encoder.layers.0.self_attn.in_proj_weight"]
            checkpoint["state_dict"]["net.encoder.layers.0.self_attn._extra_state"] = {"seen": 3}

    fit(Slim(), [SwapAttention("softmax")], max_epochs=1).save_checkpoint(tmp_path / "slim.ckpt")
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=2, callbacks=[SwapAttention("softmax")]
    )
    trainer.fit(Slim(), batches(), ckpt_path=tmp_path / "slim.ckpt")
    assert trainer.current_epoch == 2


def test_resuming_a_plain_run_under_the_same_parameters(tmp_path):
    straight = TinyLM()
    fit(straight, max_epochs=2)
    fit(TinyLM()).save_checkpoint(tmp_path / "plain.ckpt")
    swapped = weights_of(resumed(tmp_path / "plain.ckpt", SwapAttention("softmax")))
    torch.testing.assert_close(swapped, weights_of(straight), atol=1e-6, rtol=1e-5)


def test_going_on_with_another_swap_warns(tmp_path):
    swap = SwapAttention("softmax")
    fit(TinyLM(), [swap], max_epochs=1).save_checkpoint(tmp_path / "one.ckpt")

    class Other(SoftmaxAttention):
        pass

    globals()["Other"] = Other
    Other.__qualname__ = "Other"
    said = r"another swap by SwapAttention: softmax in net.*layers\.0.*, net.*layers\.1.*, where .* has .*Other now"
    with pytest.warns(UserWarning, match=rf"{said}; to train on with this one, start a new run"):
        resumed(tmp_path / "one.ckpt", SwapAttention(Other))
    tester = pl.Trainer(accelerator="cpu", logger=False, callbacks=[SwapAttention(Other)])
    with pytest.warns(UserWarning, match=rf"{said}$"):
        tester.test(TinyLM(), batches(1), ckpt_path=tmp_path / "one.ckpt", verbose=False)
    fit(TinyLM(), [SwapAttention("twicing", layers=[0])], max_epochs=1).save_checkpoint(tmp_path / "two.ckpt")
    other = [SwapAttention("softmax", layers=[0]), SwapAttention("twicing", layers=[1])]
    with pytest.warns(
        UserWarning, match=r"twicing in .*layers\.0.* has softmax now; none in .*layers\.1.* twicing now"
    ):
        resumed(tmp_path / "two.ckpt", *other)
    with pytest.raises(RuntimeError, match=r"layers\.0\S+mechanism\.saved_by_attnswap_load_with_load_swapped"):
        resumed(tmp_path / "two.ckpt", SwapAttention("twicing", layers=[1]))
    fit(TinyLM()).save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.warns(UserWarning, match=r"none in .*layers\.1.*, where SwapAttention has twicing now"):
        resumed(tmp_path / "plain.ckpt", SwapAttention("twicing", layers=[1]))


@pytest.mark.parametrize("again", [SoftmaxAttention, "attention_modules.mechanisms.softmax.SoftmaxAttention"])
def test_the_same_swap_in_another_spelling_and_over_a_swapped_module_is_the_same(tmp_path, again):
    fit(TinyLM(), [SwapAttention("softmax")], max_epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    fit(TinyLM(), [SwapAttention("twicing", layers=[0])], max_epochs=1).save_checkpoint(tmp_path / "two.ckpt")
    over = load_swapped(TinyLM, tmp_path / "two.ckpt")
    fit(over, [SwapAttention("sink", layers=[1])], max_epochs=1).save_checkpoint(tmp_path / "three.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed(tmp_path / "one.ckpt", SwapAttention(again))
        trainer = pl.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            max_epochs=2,
            callbacks=[SwapAttention("sink", layers=[1])],
        )
        trainer.fit(load_swapped(TinyLM, tmp_path / "two.ckpt"), batches(), ckpt_path=tmp_path / "three.ckpt")
    assert not [each for each in caught if "another swap" in str(each.message)]


def test_a_test_logs_what_acts_in_which_layers(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="")
    runner = pl.Trainer(accelerator="cpu", logger=logger, callbacks=[SwapAttention("symmetric", layers=[1])])
    runner.test(TinyLM(), batches(1), verbose=False)
    (plan,) = yaml.safe_load((tmp_path / "hparams.yaml").read_text())["swapped_attention"]
    assert (plan["mechanism"], plan["layers"]) == ("symmetric", ["net.encoder.layers.1.self_attn"])


def test_two_callbacks_on_one_layer_are_an_error():
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn"):
        fit(TinyLM(), [SwapAttention("softmax", layers=[1]), SwapAttention("symmetric", where="*")])


def test_two_callbacks_on_two_layers():
    module = TinyLM()
    fit(module, [SwapAttention("symmetric", layers=[1]), SwapAttention("softmax", layers=[0])], max_steps=1)
    assert Counter(type(found).__name__ for found in mechanisms(module)) == {
        "SymmetricAttention": 1,
        "SoftmaxAttention": 1,
    }


class LocalParent:
    class Nested(SoftmaxAttention):
        pass


def make_local_class():
    class Local(SoftmaxAttention):
        pass

    return Local


@each_row(
    ("arguments", "message"),
    [
        (("softmx",), "Did you mean 'softmax'"),
        (("no_such_package.Mechanism",), "no module 'no_such_package'"),
        ((make_local_class(),), "at the top level of a module"),
        ((PATH, {"temperature": torch.zeros(1)}), r"options\.temperature .* is no plain data"),
        ((PATH, {"temperature": float}), r"options\.temperature .* is no plain data"),
        ((PATH, ["temperature"]), r"options of TemperedSoftmax must be a dict .* got \['temperature'\]"),
        ((PATH, {"temprature": 2.0}), "no option 'temprature'.*Did you mean 'temperature'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SwapAttention(*arguments)


def test_a_class_within_a_class_is_named_by_its_path():
    assert SwapAttention(LocalParent.Nested).mechanism == f"{__name__}.LocalParent.Nested"


def test_a_lambda_is_an_error_that_names_the_cure():
    with pytest.raises(TypeError, match="subclass of AttentionMechanism"):
        SwapAttention(lambda spec: SoftmaxAttention(spec))


def test_nothing_matched_leaves_the_module_as_it_was():
    module = TinyLM()
    with pytest.raises(ValueError, match="blocks"):
        fit(module, [SwapAttention("softmax", where="blocks.*")])
    assert mechanisms(module) == []
    assert "configure_model" not in vars(module)
