"""Publishes the multi-token-prediction module of a verifier as a drafter, without more training.

    python -m redraft.train.objectives.mtp VERIFIER OUT

writes the module of the checkpoint VERIFIER as the drafter OUT, for `redraft build VERIFIER --drafter OUT`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig

from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import Identity, save_drafter
from redraft.export.drafters.layer import renamed
from redraft.export.drafters.mtp import MtpDrafter, configuration_of
from redraft.methods.mtp import METHOD
from redraft.train.mtp import load_mtp


def publish_module(verifier: Path, out: Path) -> None:
    """Write a drafter's folder. Raises CheckpointError if the verifier has no module."""
    module = load_mtp(verifier)
    shape = AutoConfig.from_pretrained(str(verifier))
    config = configuration_of(shape, int(shape.vocab_size))
    drafter = MtpDrafter(config)
    drafter.load_state_dict({renamed(name): tensor for name, tensor in module.state_dict().items()})
    counts = torch.ones(config.vocab_size, dtype=torch.long)
    save_drafter(out, METHOD.id, config, Identity.of(Checkpoint.open(verifier)), drafter, counts, {})


def main() -> None:
    """Run the command of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verifier", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    publish_module(arguments.verifier, arguments.out)


if __name__ == "__main__":
    main()
