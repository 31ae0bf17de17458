"""What the layers of a swap owe to the weights around them: frozen ones stay frozen, and copies stay equal."""

from __future__ import annotations

import warnings

from torch import nn

from attention_modules.base import AttentionMechanism
from attention_modules.hosts.base import AttentionLayer, acting_mechanism
from attention_modules.hosts.discovery import Survey
from attention_modules.hosts.networks import Network, are_copies

Plan = list[tuple[AttentionLayer, AttentionMechanism]]


def freeze_as_layers(plan: Plan) -> None:
    """Let the Parameters of each mechanism train only where some Parameter of its layer does.

    A Parameter that several mechanisms hold trains where one of their layers does.
    """
    trained = {id(each) for layer, built in plan if not _is_frozen(layer.module) for each in built.parameters()}
    for layer, built in plan:
        if _is_frozen(layer.module):
            for parameter in built.parameters():
                parameter.requires_grad_(id(parameter) in trained and parameter.requires_grad)


def _is_frozen(layer: nn.Module) -> bool:
    """Whether the layer has Parameters beside its mechanism's, and none of them trains."""
    own = [parameter for name, parameter in layer.named_parameters() if not name.startswith("mechanism.")]
    return bool(own) and not any(parameter.requires_grad for parameter in own)


def equalize_copies(found: Survey, plan: Plan) -> None:
    """Give equal tensors to new mechanisms in twins that are copies, value by value, or of which one is frozen.

    What a twin has had since an earlier swap is its own, unless the layers are copies.
    """
    made: dict[str, AttentionMechanism] = {}
    for layer, built in plan:
        network = found.network_of(layer.name)
        for twin in found.twins_of(network):
            other = _counterpart(layer.name, network, twin)
            source, its = made.get(other), found.modules[other]
            copies = (source is not None and network.frozen != twin.frozen) or are_copies(layer.module, its)
            if source is None:
                acting = acting_mechanism(getattr(its, "mechanism", None))
                known = acting is not None and acting.built_with is not None
                source = acting if known and acting.built_with == built.built_with else None  # type: ignore[union-attr]
            if source is not None and copies and _fits(source, built):
                built.load_state_dict(source.state_dict())
                break
        made[layer.name] = built


def warn_of_twins(found: Survey, plan: Plan) -> None:
    """Warn where a swap leaves out a layer of a network whose counterpart in a twin it took."""
    if not found.networks[1:]:
        return
    taken = {layer.name: type(built) for layer, built in plan}
    told: set[frozenset[str]] = set()
    for layer, built in plan:
        network = found.network_of(layer.name)
        for twin in found.twins_of(network):
            other = _counterpart(layer.name, network, twin)
            has = taken.get(other, type(acting_mechanism(getattr(found.modules[other], "mechanism", None))))
            pair = frozenset((network.name, twin.name))
            if has is not type(built) and pair not in told:
                told.add(pair)
                warnings.warn(
                    f"{network.name or 'the model'!r} and {twin.name or 'the model'!r} have equal layers, and this "
                    f"swap takes {layer.name!r} without {other!r}: they are no copies any more, and an average over "
                    "zipped Parameters fails; select both, unless the other stays as it is",
                    stacklevel=5,
                )


def _counterpart(layer: str, network: Network, twin: Network) -> str:
    return ".".join(filter(None, (twin.stem, network.within(layer))))


def _fits(source: AttentionMechanism, built: AttentionMechanism) -> bool:
    """Whether the tensors of one mechanism can be those of another."""
    shapes = [{name: tensor.shape for name, tensor in each.state_dict().items()} for each in (source, built)]
    return type(source) is type(built) and shapes[0] == shapes[1]
