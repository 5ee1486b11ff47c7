"""What docs/files.md takes for granted: a folder of the Trainer with one flipped bit."""

from __future__ import annotations

import os

import torch
from safetensors.torch import save_file


def write_damaged_folder(path: str) -> None:
    """A model, and its optimizer with a wrong bit in a tensor."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    os.makedirs(path)
    save_file(model.state_dict(), f"{path}/model.safetensors")
    torch.save(optimizer.state_dict(), f"{path}/optimizer.pt")
    with open(f"{path}/trainer_state.json", "w") as file:
        file.write('{"global_step": 500}')
    with open(f"{path}/optimizer.pt", "r+b") as file:
        data = bytearray(file.read())
        data[data.index(optimizer.state[model.weight]["exp_avg"].numpy().tobytes())] ^= 1
        file.seek(0)
        file.write(data)
