"""The weights of the network in a checkpoint of attnswap, as a file that timm reads (`checkpoint_path`).

python examples/healing/weights_of.py RUN/checkpoints/last.ckpt weights.pt
"""

import sys

import torch


def main(checkpoint: str, file: str) -> None:
    state = torch.load(checkpoint, weights_only=True, map_location="cpu")["state_dict"]
    torch.save({name.removeprefix("model."): tensor for name, tensor in state.items()}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
