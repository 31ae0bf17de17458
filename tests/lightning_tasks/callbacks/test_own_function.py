"""Somebody's own function as a mechanism: swapped by the callback and in tasks, kept in checkpoints by its path."""

import jsonargparse
import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional as F

from attention_modules import mechanism_class, register_mechanism
from attention_modules.mechanism import _REGISTRY
from lightning_tasks import LanguageModelingTask, load_swapped
from lightning_tasks.callbacks import SwapAttention
from lightning_tasks.files.names import allowed_names
from lightning_tasks.files.stored import check_stored
from lightning_tasks.training.mechanisms import attention_spec, mechanism_from
from tests.lightning_tasks.callbacks.modules import TinyLM, batches, fit
from tests.lightning_tasks.language_data import SMALL, VOCAB
from tests.rows import each_row


def tempered(q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, scale=None, *, temperature=2.0):
    scale = (q.shape[-1] ** -0.5 if scale is None else scale) / temperature
    return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)


PATH = f"{__name__}.tempered"
STORED = {"mechanism": {"class_path": PATH, "init_args": {"temperature": 3.0}}}


@pytest.fixture
def registered():
    yield register_mechanism("tempered")(tempered)
    _REGISTRY.pop("tempered")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A module with the function in its layers, and its checkpoint."""
    module, path = TinyLM(), tmp_path_factory.mktemp("run") / "own.ckpt"
    swap = SwapAttention(tempered, temperature=3.0)
    fit(module, [swap], max_steps=2).save_checkpoint(path)
    assert [row.mechanism for row in swap.report] == ["tempered"] * 2
    return module.eval(), path


def test_a_function_is_stored_by_its_path(trained):
    _, path = trained
    states = torch.load(path, weights_only=True)["callbacks"].values()
    (plan,) = [state["plan"] for state in states if "plan" in state]
    assert (plan["mechanism"], plan["options"]) == (PATH, {"temperature": 3.0})
    callbacks = [SwapAttention(PATH, {"temperature": 3.0})]
    trainer = pl.Trainer(accelerator="cpu", max_steps=4, logger=False, enable_checkpointing=False, callbacks=callbacks)
    resumed = TinyLM()
    trainer.fit(resumed, batches(4), ckpt_path=path)
    assert trainer.global_step == 4
    assert type(resumed.net["encoder"].layers[0].self_attn.mechanism) is mechanism_class(tempered)


def test_a_checkpoint_alone_may_name_no_function_but_a_registered_one(trained, registered):
    module, path = trained
    tokens = next(iter(batches()))[0]
    assert torch.equal(load_swapped(TinyLM, path).eval()(tokens), module(tokens))
    _REGISTRY.pop("tempered")
    try:
        function = rf"names '{PATH}', which is a function.*@register_mechanism\(NAME\)"
        with pytest.raises(ValueError, match=function) as refused:
            load_swapped(TinyLM, path)
        said = str(refused.value)
        assert "put @register_mechanism(NAME) above the function before you load the file; or" in said
        assert "import the module" not in said  # it is imported
        assert ",." not in said
        assert "give the argument yourself" not in said  # there is none
        assert torch.equal(load_swapped(TinyLM, path, trust_checkpoint=True).eval()(tokens), module(tokens))
    finally:
        register_mechanism("tempered")(tempered)


def test_the_user_s_configuration_lets_a_checkpoint_name_this_very_function():
    check_stored(STORED, allowed_names({"model": STORED}), "a.ckpt")
    check_stored(STORED, allowed_names(tempered), "a.ckpt")
    for named in ({"model": {"mechanism": f"{__name__}.TinyLM"}}, TinyLM, {"mechanism": "lightning_tasks.tempered"}):
        with pytest.raises(ValueError, match=r"a function.* @register_mechanism\(NAME\)"):
            check_stored(STORED, allowed_names(named), "a.ckpt")
    for path in ("shutil.copytree", "torch.nn.functional.multi_head_attention_forward"):
        with pytest.raises(ValueError, match="was not called"):
            check_stored({"mechanism": path}, allowed_names(TinyLM), "a.ckpt")


def test_a_registered_function_needs_no_configuration(registered):
    check_stored(STORED, (), "a.ckpt")
    with pytest.raises(ValueError, match=r"which your program has not imported|which is a function"):
        check_stored({"mechanism": f"{__name__}.fit"}, (), "a.ckpt")


@each_row(
    ("arguments", "options", "message"),
    [
        ((lambda q, k, v: v,), {}, "cannot be stored in a checkpoint, as it cannot be imported again"),
        ((tempered, {"temperature": 1.0}), {"temperature": 2.0}, "temperature stands in options and as a keyword"),
        ((tempered,), {"temprature": 2.0}, "no option 'temprature'; it takes temperature. Did you mean 'temperature'"),
        (("rpc",), {"iteration": 2}, "no option 'iteration'.*Did you mean 'iterations'"),
        (("runpy.run_path",), {}, "mechanism names 'runpy.run_path', which is a function"),
        (("rpc", {"iterations": 1}), {"lam": -1.0}, "lam"),
    ],
)
def test_bad_arguments(arguments, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        SwapAttention(*arguments, **options)


def test_options_are_keywords_or_a_dict():
    one, other = SwapAttention("rpc", iterations=3, layers=[0]), SwapAttention("rpc", {"iterations": 3}, layers=[0])
    assert (one.mechanism, one.options, one.layers) == (other.mechanism, other.options, other.layers)
    assert SwapAttention("rpc", {"iterations": 3}, lam=2.0).options == {"iterations": 3, "lam": 2.0}


def test_configurations_give_a_function_by_its_path_and_options():
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--callbacks", type=list[pl.Callback])
    for mechanism, options, named in [
        (PATH, {"temperature": 3.0}, PATH),
        ("rpc", {"iterations": 3}, "rpc"),
        ("torch.nn.functional.scaled_dot_product_attention", {}, "softmax"),
    ]:
        given = {"mechanism": mechanism, "options": options, "layers": [0]}
        config = parser.parse_object({"callbacks": [{"class_path": "SwapAttention", "init_args": given}]})
        assert "dict_kwargs" not in parser.dump(config)
        (made,) = parser.instantiate(config).callbacks
        assert (made.mechanism, made.options, made.layers) == (named, options, [0])
    override = ["--callbacks+=SwapAttention", "--callbacks.mechanism=rpc", "--callbacks.options.iterations=2"]
    assert parser.parse_args(override).callbacks[0].init_args.options == {"iterations": 2}
    with pytest.raises(jsonargparse.ArgumentError, match="'iterations' is not accepted"):
        parser.parse_object({"callbacks": [{"class_path": "SwapAttention", "init_args": {"iterations": 3}}]})


def test_a_task_takes_a_function(registered):
    task = LanguageModelingTask(SMALL, vocab_size=VOCAB, mechanism=tempered, options={"temperature": 3.0})
    assert task.hparams["mechanism"] == {"class_path": PATH, "init_args": {}}
    task.configure_model()
    assert {type(layer.attn.mechanism).__name__ for layer in task.model.layers} == {"tempered"}
    by_name = {"class_path": "tempered", "init_args": {"temperature": 3.0}}
    assert attention_spec(by_name) == {"class_path": PATH, "init_args": {"temperature": 3.0}}
    assert SwapAttention(type(task.model.layers[0].attn.mechanism)).mechanism == PATH
    assert attention_spec(F.scaled_dot_product_attention) == "softmax"
    assert mechanism_from(attention_spec(PATH), {"temperature": 1.0}) == (tempered, {"temperature": 1.0})
    with pytest.raises(TypeError, match="no option 'temprature'"):
        LanguageModelingTask(SMALL, vocab_size=VOCAB, mechanism=tempered, options={"temprature": 3.0})
    with pytest.raises(TypeError, match="cannot be imported again"):
        LanguageModelingTask(SMALL, vocab_size=VOCAB, mechanism=lambda q, k, v: v)
